import os
import subprocess
import sys
import time

import pytest
from transformers import GenerationConfig

from podium.utils import tokenizer as module
from podium.utils.errors import UserError
from podium.utils.tokenizer import load_tokenizer, resolve_model, stop_token_ids
from tests.utils.small_tokenizers import char_tokenizer


def test_a_directory_loads_ready_for_generation(tmp_path):
    char_tokenizer(pad=False).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    assert tokenizer.decode(tokenizer("291417=").input_ids) == "291417="


def test_a_pad_token_of_its_own_stays(tmp_path):
    char_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).pad_token == "<pad>"


def test_no_end_of_sequence_is_refused(tmp_path):
    tokenizer = char_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="end-of-sequence"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(("named", "expected"), [(None, (1,)), (1, (1,)), ([5, 1], (1, 5)), (7, (1, 7))])
def test_what_ends_a_response_is_the_tokenizers_and_the_generation_configs(tmp_path, named, expected):
    char_tokenizer().save_pretrained(tmp_path)
    if named is not None:
        GenerationConfig(eos_token_id=named).save_pretrained(tmp_path)
    assert stop_token_ids(str(tmp_path), load_tokenizer(str(tmp_path))) == expected


@pytest.mark.parametrize("path", ["/no/such/dir", "./no/such", "no/such/dir", "~/no-such-dir", "missing/"])
def test_a_path_that_is_not_there_names_the_key(path):
    with pytest.raises(UserError, match=r"actor.model.path=.*no such directory"):
        load_tokenizer(path, key="actor.model.path")


def test_an_empty_key_a_file_and_an_empty_directory(tmp_path):
    with pytest.raises(UserError, match="not set"):
        load_tokenizer("")
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(UserError, match="is a file"):
        load_tokenizer(str(file))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"model.path=.*no tokenizer loads"):
        load_tokenizer(str(tmp_path / "empty"))


def test_a_hub_name_without_network_or_cache_fails_at_once(tmp_path):
    """In a process of its own, because the hub's client reads its environment when it is imported."""
    code = "from podium.utils.tokenizer import load_tokenizer; load_tokenizer('podium-tests/no-such-model')"
    environment = {
        **os.environ,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": os.getcwd(),
    }
    start = time.monotonic()
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    last = run.stderr.strip().splitlines()[-1]
    assert "UserError: model.path=podium-tests/no-such-model is neither a directory here nor in the local" in last
    assert "Retrying" not in run.stderr
    assert time.monotonic() - start < 30  # nearly all of it is importing


def test_a_cached_model_is_used_when_the_hub_is_away(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--owner--small" / "snapshots" / "abc"
    char_tokenizer().save_pretrained(snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    monkeypatch.setattr(module, "_hub_is_reachable", lambda: False)
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert resolve_model("owner/small") == ("owner/small", True)
    with pytest.raises(UserError, match="cannot be reached"):
        resolve_model("owner/other")
    with pytest.raises(UserError, match="cannot be reached"):
        resolve_model("not a hub name!")
