import json
import os
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.utils.dataset import (
    EpochLoader,
    PromptDataset,
    collate_prompts,
)
from podium.utils.dataset_text import ROWS_AT_ONCE, ChatOptions
from podium.utils.errors import UserError
from tests.utils.small_tokenizers import CHAT_TEMPLATE, char_tokenizer, text_of

TOKENIZER = char_tokenizer()
CHAT_TOKENIZER = char_tokenizer(template=CHAT_TEMPLATE)


# ---------------------------------------------------------------- prompts


def test_a_row_carries_what_scoring_needs(write):
    row = {
        "prompt": "291417=",
        "data_source": "sort",
        "reward_model": {"style": "rule", "ground_truth": "112479"},
        "extra_info": {"index": 7, "split": "train"},
        "ability": "sorting",
    }
    dataset = PromptDataset(write([row, {**row, "prompt": "321="}]), TOKENIZER, max_prompt_length=8)
    assert len(dataset) == 2
    assert str(dataset.report) == "2 rows kept, 0 overlong dropped, 0 truncated"
    got = dataset[0]
    assert text_of(got.pop("prompt_ids")) == "291417="
    raw_prompt = row.pop("prompt")
    assert got == {**row, "raw_prompt": raw_prompt, "index": 0}
    with pytest.raises(IndexError):
        dataset[2]


def test_absent_columns_have_defaults(write):
    got = PromptDataset(write([{"question": "1+1="}]), TOKENIZER, prompt_key="question", max_prompt_length=8)[0]
    assert (got["data_source"], got["reward_model"], got["extra_info"]) == ("unknown", {}, {})


def test_a_chat_goes_through_the_template(write):
    chats = [
        [{"role": "system", "content": "sort", "name": "s"}, {"role": "user", "content": "21"}],
        [{"role": "user", "content": "43"}],
    ]
    dataset = PromptDataset(write([{"prompt": chat} for chat in chats]), CHAT_TOKENIZER, max_prompt_length=50)
    # Parquet gives the second chat's message a name of None, which the template must not see.
    assert text_of(dataset[0]["prompt_ids"]) == "s|system: sort\nuser: 21\nassistant: "
    assert text_of(dataset[1]["prompt_ids"]) == "user: 43\nassistant: "
    thinking = PromptDataset(
        write([{"prompt": chats[1]}]), CHAT_TOKENIZER, max_prompt_length=50, chat=ChatOptions({"think": "<>"})
    )
    assert text_of(thinking[0]["prompt_ids"]).endswith("assistant: <>")


def test_special_tokens_are_those_of_the_tokenizer_and_never_a_closing_one(write):
    file = write([{"prompt": "12"}])
    tokenizer = char_tokenizer(bos=True, close=True)
    assert text_of(PromptDataset(file, tokenizer, max_prompt_length=9)[0]["prompt_ids"]) == "<bos>12"
    chat = write([{"prompt": [{"role": "user", "content": "1"}]}], "chat")
    tokenizer = char_tokenizer(bos=True, template=CHAT_TEMPLATE)
    # A template writes its own special tokens: none are added to it.
    assert text_of(PromptDataset(chat, tokenizer, max_prompt_length=99)[0]["prompt_ids"]) == "user: 1\nassistant: "


def test_mixed_strings_and_chats_keep_their_order(tmp_path):
    file = tmp_path / "mixed.jsonl"
    prompts = ["1", [{"role": "user", "content": "2"}], "3", [{"role": "user", "content": "4"}]]
    file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    dataset = PromptDataset(str(file), CHAT_TOKENIZER, max_prompt_length=50)
    texts = [text_of(dataset[i]["prompt_ids"]) for i in range(4)]
    assert texts == ["1", "user: 2\nassistant: ", "3", "user: 4\nassistant: "]


def test_overlong_prompts(write):
    file = write([{"prompt": "123"}, {"prompt": "12345678"}, {"prompt": "12345"}])
    with pytest.raises(UserError, match=r"(row 1|line 2): the prompt has 8 tokens, data.max_prompt_length is 5"):
        PromptDataset(file, TOKENIZER, max_prompt_length=5)
    kept = PromptDataset(file, TOKENIZER, max_prompt_length=5, filter_overlong_prompts=True)
    assert (kept.report.kept, kept.report.dropped, kept.report.truncated) == (2, 1, 0)
    assert [kept[i]["index"] for i in range(2)] == [0, 2]
    assert [kept[i]["raw_prompt"] for i in range(2)] == ["123", "12345"]
    for how, expected in {"left": "45678", "right": "12345", "middle": "12378"}.items():
        cut = PromptDataset(file, TOKENIZER, max_prompt_length=5, truncation=how)
        assert text_of(cut[1]["prompt_ids"]) == expected
        assert (cut.report.kept, cut.report.truncated) == (3, 1)
    with pytest.raises(UserError, match=r"all 3 prompts are longer than data.max_prompt_length=2"):
        PromptDataset(file, TOKENIZER, max_prompt_length=2, filter_overlong_prompts=True)


def test_bad_rows_are_named(write):
    def message(rows, tokenizer=TOKENIZER, **kwargs):
        with pytest.raises(UserError) as caught:
            PromptDataset(write(rows), tokenizer, max_prompt_length=20, **kwargs)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no column 'prompt' (data.prompt_key); it has question" in message([{"question": "1"}])
    text = message([{"prompt": "1"}, {"prompt": None}])
    assert "column 'prompt' is null" in text and ("row 1" in text or "line 2" in text)
    assert "column 'prompt' is int" in message([{"prompt": 3}])
    assert "column 'prompt' is list" in message([{"prompt": [{"text": "1"}]}])
    assert "no tokens" in message([{"prompt": ""}])
    assert "no chat template" in message([{"prompt": [{"role": "user", "content": "1"}]}])
    refusing = char_tokenizer(template="{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in message([{"prompt": [{"role": "user", "content": "1"}]}], refusing)
    assert "data.truncation=both" in message([{"prompt": "1"}], truncation="both")
    assert "column 'responses' has the name of a batch column" in message([{"prompt": "1", "responses": "2"}])


def test_more_rows_than_are_tokenized_at_once(tmp_path):
    file = tmp_path / "many.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": str(i)} for i in range(9000)]), file)
    dataset = PromptDataset(str(file), TOKENIZER, max_prompt_length=4)
    assert [text_of(dataset[i]["prompt_ids"]) for i in (0, 4095, 4096, 8999)] == ["0", "4095", "4096", "8999"]


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=5))
def test_collated_prompts_are_left_padded(sequences):
    rows = [{"prompt_ids": ids, "extra_info": {}} for ids in sequences]
    tensors, objects = collate_prompts(rows, pad_token_id=0, max_prompt_length=6)
    assert tensors["prompts"].dtype == torch.int64 and tensors["prompt_mask"].dtype == torch.bool
    assert tensors["prompts"].shape == tensors["prompt_mask"].shape == (len(sequences), 6)
    for row, ids in enumerate(sequences):
        mask = tensors["prompt_mask"][row]
        assert tensors["prompts"][row][mask].tolist() == ids
        assert mask.tolist() == sorted(mask.tolist())
        assert (tensors["prompts"][row][~mask] == 0).all()
    assert all(column.dtype == object and column.shape == (len(sequences),) for column in objects.values())
    assert objects["prompt_ids"].tolist() == sequences


@pytest.mark.slow
@pytest.mark.parametrize("bad", [None, 7])
def test_several_processes_give_what_one_gives(tmp_path, monkeypatch, bad):
    """More rows than one block; the error names the same row."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    rows = [{"prompt": [{"role": "user", "content": "1" * (i % 9)}]} for i in range(ROWS_AT_ONCE + 9)]
    if bad is not None:
        rows[ROWS_AT_ONCE + bad]["prompt"] = None
    file = str(tmp_path / "rows.parquet")
    pq.write_table(pa.Table.from_pylist(rows), file)

    def read(workers):
        try:
            return PromptDataset(
                file, CHAT_TOKENIZER, max_prompt_length=25, filter_overlong_prompts=True, workers=workers
            )
        except UserError as error:
            return str(error)

    one, two = read(1), read(2)
    if bad is not None:
        assert one == two and one.endswith("expected a string or a non-empty list of messages {role, content}")
        return
    assert one.report == two.report and one.report.dropped > 0
    assert all(one[i] == two[i] for i in range(0, len(one), 97)) and len(one) == len(two)


def test_columns_by_other_names(write):
    rows = [{"prompt": "1", "source": "gsm8k", "answer": "2", "info": {"level": 3}}]
    names = {"data_source": "source", "ground_truth": "answer", "extra_info": "info"}
    row = PromptDataset(write(rows), TOKENIZER, max_prompt_length=9, column_names=names)[0]
    assert row["data_source"] == "gsm8k" and row["reward_model"] == {"ground_truth": "2"}
    assert row["extra_info"] == {"level": 3}
    with pytest.raises(UserError, match=r"no column 'solution' \(data.column_names.ground_truth\)"):
        PromptDataset(write(rows), TOKENIZER, max_prompt_length=9, column_names={"ground_truth": "solution"})
    with pytest.raises(UserError, match=r"data.column_names has 'truth'; expected one of data_source"):
        PromptDataset(write(rows), TOKENIZER, max_prompt_length=9, column_names={"truth": "answer"})


def test_the_fingerprint_is_of_prompts_and_what_they_are_scored_by(write):
    row = {
        "prompt": "1+1=",
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"level": 1},
        "note": "a",
    }

    def fingerprint(name: str, **changes) -> str:
        path = write([{**row, "prompt": "1" * 20}, row, {**row, **changes}], name)
        return PromptDataset(path, TOKENIZER, max_prompt_length=8, filter_overlong_prompts=True).fingerprint()

    same = fingerprint("a")
    assert same == fingerprint("b") == fingerprint("c", note="b")
    changes = (
        {"prompt": "1+2="},
        {"data_source": "other"},
        {"reward_model": {"style": "rule", "ground_truth": "3"}},
        {"extra_info": {"level": 2}},
    )
    others = {fingerprint(f"other{number}", **change) for number, change in enumerate(changes)}
    assert len(others | {same}) == 5

    named = []
    for number, answer in enumerate("23"):
        path = write([{"prompt": "1+1=", "answer": answer}], f"named{number}")
        dataset = PromptDataset(path, TOKENIZER, max_prompt_length=8, column_names={"ground_truth": "answer"})
        named.append(dataset.fingerprint())
    assert named[0] != named[1]


def test_items_by_the_entry_they_come_from(write):
    long = {"prompt": "1" * 20}
    files = [write([{"prompt": "1"}, long, {"prompt": "2"}], "a"), write([long, {"prompt": "3"}], "b")]
    dataset = PromptDataset(files, TOKENIZER, max_prompt_length=9, filter_overlong_prompts=True)
    assert [items.tolist() for items in dataset.by_entry()] == [[0, 1], [2]]


# ---------------------------------------------------------------- order


@given(
    rows=st.integers(1, 30),
    batch=st.integers(1, 30),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    done=st.integers(0, 40),
)
def test_resuming_goes_on_exactly(rows, batch, seed, shuffle, drop_last, done):
    if drop_last and batch > rows:
        with pytest.raises(UserError, match=f"{batch} cannot be drawn from {rows} rows"):
            EpochLoader(rows, batch, seed, shuffle, drop_last)
        return
    first = EpochLoader(rows, batch, seed, shuffle, drop_last)
    for _ in range(done):
        next(first)
    second = EpochLoader(rows, batch, seed, shuffle, drop_last)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(5):
        (epoch_a, a), (epoch_b, b) = next(first), next(second)
        assert epoch_a == epoch_b
        np.testing.assert_array_equal(a, b)


@given(st.integers(1, 30), st.integers(1, 10), st.booleans())
def test_an_epoch_visits_every_row_once(rows, batch, shuffle):
    loader = EpochLoader(rows, batch, seed=3, shuffle=shuffle, drop_last=False)
    for epoch in range(2):
        batches = [next(loader) for _ in range(len(loader))]
        assert {e for e, _ in batches} == {epoch}
        seen = np.concatenate([indices for _, indices in batches])
        assert sorted(seen) == list(range(rows))
        if not shuffle:
            assert seen.tolist() == list(range(rows))


def test_the_order_depends_on_seed_and_epoch_alone():
    orders = {
        (seed, epoch): EpochLoader(100, size, seed).order(epoch).tobytes()
        for size in (7, 10)
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(set(orders.values())) == 4
    assert EpochLoader(100, 7, 0).order(1).tobytes() == EpochLoader(100, 10, 0).order(1).tobytes()
    assert len(EpochLoader(10, 4, 0)) == 2 and len(EpochLoader(10, 4, 0, drop_last=False)) == 3


def test_a_position_in_other_data_is_refused():
    state = EpochLoader(10, 2, 0).state_dict()
    with pytest.raises(UserError, match="dataset_len was 10 and is now 12"):
        EpochLoader(12, 2, 0).load_state_dict(state)
    with pytest.raises(UserError, match="batch_size was 2 and is now 5"):
        EpochLoader(10, 5, 0).load_state_dict(state)
