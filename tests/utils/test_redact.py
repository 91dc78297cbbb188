from podium.utils.redact import REDACTED, redact


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
    assert safe == {"env_vars": {"NCCL_DEBUG": REDACTED}, "url": REDACTED, "name": "short"}
