import dataclasses

import pytest

from podium.trainer.config import PPOConfig, RMConfig, SFTConfig
from podium.utils.errors import UserError
from podium.utils.redact import REDACTED, redact, redact_arguments, redact_text, require_secrets, secret_values


def test_secret_names_are_redacted_and_others_are_not():
    config = {
        "WANDB_API_KEY": "k",
        "OPENAI_KEY": "k",
        "HF_TOKEN": "t",
        "api_key": "k",
        "apiKey": "k",
        "accessToken": "k",
        "password": "p",
        "client_secret": "s",
        "nested": [{"hf_token": "t", "kept": 1}],
        "prompt_key": "prompt",
        "eos_token": "</s>",
        "max_tokens": 3,
        "pad_token_id": 0,
        "api_key_unset": None,
        "token": None,
        "lr": 1e-6,
    }
    safe = redact(config, environ={})
    secret = {name for name, value in safe.items() if value == REDACTED}
    assert secret == {
        "WANDB_API_KEY", "OPENAI_KEY", "HF_TOKEN", "api_key", "apiKey", "accessToken", "password", "client_secret",
    }  # fmt: skip
    assert safe["nested"] == [{"hf_token": REDACTED, "kept": 1}]
    assert {name: safe[name] for name in safe if name not in secret and name != "nested"} == {
        name: config[name] for name in config if name not in secret and name != "nested"
    }
    assert config["api_key"] == "k"  # a copy was made


def test_environments_and_values_from_the_environment_are_redacted():
    config = {"env_vars": {"NCCL_DEBUG": "INFO"}, "url": "https://host/?q=abcdefgh1234", "name": "short"}
    safe = redact(config, environ={"MY_SERVICE_TOKEN": "abcdefgh1234", "SMALL_KEY": "short", "HOME": "https://host"})
    assert safe == {
        "env_vars": {"NCCL_DEBUG": REDACTED},
        "url": "https://host/?q=${oc.env:MY_SERVICE_TOKEN}",
        "name": "short",
    }


def test_names_of_headers_and_what_is_in_them_at_any_depth():
    config = {
        "reward_kwargs": {"judges": [{"headers": {"Authorization": "Bearer tok", "X-Api-Key": "k", "Accept": "x"}}]}
    }
    [judge] = redact(config, environ={})["reward_kwargs"]["judges"]
    assert judge["headers"] == {"Authorization": REDACTED, "X-Api-Key": REDACTED, "Accept": "x"}
    config = {"cookies": {"session": "s"}, "auth": ["user", "pass"], "clientSecret": "s", "author": "me", "Bearer": "b"}
    assert redact(config, environ={}) == {
        "cookies": {"session": REDACTED}, "auth": [REDACTED, REDACTED], "clientSecret": REDACTED, "author": "me",
        "Bearer": REDACTED,
    }  # fmt: skip


TEXTS = {
    "https://user:pass@host/x": "https://<redacted>@host/x",
    "see git+https://tok@h/x, or https://host/a@b": "see git+https://<redacted>@h/x, or https://host/a@b",
    "GET https://h/v1?api_key=abc&n=1": "GET https://h/v1?api_key=<redacted>&n=1",
    '{"Accept": "*", "X": "Bearer tok"}': '{"Accept": "*", "X": "Bearer <redacted>"}',
    "me@host, ssh://host and bearer of news": "me@host, ssh://host and bearer of news",
}


@pytest.mark.parametrize(("text", "safe"), TEXTS.items())
def test_in_any_text(text: str, safe: str):
    assert redact({"a": [text]}, environ={}) == {"a": [safe]} and redact_text(text, environ={}) == safe


def test_what_the_environment_holds_can_be_read_from_it_again():
    environ = {"JUDGE_API_KEY": "jk-123456", "LOGIN": "name-and-more", "TOKENIZERS_PARALLELISM": "sometimes"}
    config = {
        "api_key": "jk-123456",
        "headers": {"Authorization": "Bearer jk-123456", "Cookie": "a=jk-123456"},
        "password": "name-and-more",
        "user": "name-and-more",
        "url": "https://bob:jk-123456@host",
        "words": "sometimes",
    }
    safe = redact(config, environ)
    assert safe == {
        "api_key": "${oc.env:JUDGE_API_KEY}",
        "headers": {"Authorization": "Bearer ${oc.env:JUDGE_API_KEY}", "Cookie": REDACTED},
        "password": "${oc.env:LOGIN}",
        "user": "name-and-more",
        "url": "https://bob:${oc.env:JUDGE_API_KEY}@host",
        "words": "sometimes",
    }
    assert redact(safe, environ) == safe == redact(safe, {})


def test_texts_without_secrets_of_the_configuration():
    config = {"sources": {"a": {"reward_kwargs": {"headers": {"Authorization": "Bearer tok-12345"}, "token": "short"}}}}
    secrets = secret_values(config)
    assert set(secrets) == {"Bearer tok-12345", "tok-12345"}
    assert redact_text("401: Bearer tok-12345, tok-12345, short", secrets, {}) == "401: <redacted>, <redacted>, short"
    assert redact_text("401: pw-12345678", environ={"DB_PASSWORD": "pw-12345678"}) == "401: ${oc.env:DB_PASSWORD}"


ARGUMENTS = {
    "a.b={api_key: sk-1, n: 2}: there is no key": "a.b={api_key: <redacted>, n: 2}: there is no key",
    "a.api_key='b c': wrong": "a.api_key=<redacted>: wrong",
    "f.yaml: a={'Authorization': 'Bearer b', 'n': 1}": "f.yaml: a={'Authorization': <redacted>, 'n': 1}",
    "b=c.api_key=sk-1": "b=c.api_key=<redacted>",
    "a.api_key=${oc.env:A}: no A": "a.api_key=${oc.env:A}: no A",
    "a.b.api_key: it is not set": "a.b.api_key: it is not set",
    "data.prompt_key=x: no column 'x'": "data.prompt_key=x: no column 'x'",
}


@pytest.mark.parametrize(("text", "safe"), ARGUMENTS.items())
def test_arguments_in_error_lines(text: str, safe: str):
    assert redact_arguments(text) == safe


def test_a_secret_that_was_not_written_down_must_be_given_again():
    require_secrets({"a": {"b": ["c", 1, None]}, "key": "${oc.env:KEY}"})
    with pytest.raises(
        UserError, match=r"^a.b\[1\].key, a.url: a secret is not written down .* 'a.b\[1\].key=\$\{oc.env:NAME\}'"
    ):
        require_secrets({"a": {"b": ["c", {"key": REDACTED}], "url": f"https://{REDACTED}@host"}})


@pytest.mark.parametrize("config", [PPOConfig, SFTConfig, RMConfig])
def test_no_key_of_ours_looks_like_a_secret(config):
    plain = dataclasses.asdict(config())
    assert REDACTED not in str(redact(plain, environ={})) and not secret_values(plain)
