import pytest
import torch

from podium.utils.dataset_pairs import PreferenceDataset, collate_pairs
from podium.utils.errors import UserError
from tests.utils.small_tokenizers import CHAT_TEMPLATE, char_tokenizer, text_of

TOKENIZER = char_tokenizer()
CHAT_TOKENIZER = char_tokenizer(template=CHAT_TEMPLATE)
USER, ASSISTANT = ({"role": role, "content": "1"} for role in ("user", "assistant"))


def pairs(file, tokenizer=TOKENIZER, **kwargs):
    return PreferenceDataset(file, tokenizer, **{"max_prompt_length": 60, "max_response_length": 8, **kwargs})


def texts(row, tokenizer=TOKENIZER):
    return {
        side: (text_of(ids := row[side]["input_ids"], tokenizer), text_of(ids[: row[side]["prompt_length"]], tokenizer))
        for side in ("chosen", "rejected")
    }


def test_strings(write):
    row = pairs(write([{"prompt": "21=", "chosen": "12", "rejected": "21<eos>"}]))[0]
    assert texts(row) == {"chosen": ("21=12<eos>", "21="), "rejected": ("21=21<eos>", "21=")}
    assert row["margin"] == 0.0


def test_the_three_forms_of_a_chat_are_one(write):
    good, bad = ({"role": "assistant", "content": text} for text in ("2", "3"))
    forms = [
        ({"prompt": [USER], "chosen": "2", "rejected": "3"}, "prompt"),
        ({"prompt": [USER], "chosen": [good], "rejected": [bad]}, "prompt"),
        ({"chosen": [USER, good], "rejected": [USER, bad]}, None),
    ]
    for number, (row, prompt_key) in enumerate(forms):
        found = texts(pairs(write([row], str(number)), CHAT_TOKENIZER, prompt_key=prompt_key)[0], CHAT_TOKENIZER)
        asked = "user: 1\nassistant: "
        assert found == {"chosen": (asked + "2<eos>", asked), "rejected": (asked + "3<eos>", asked)}


def test_several_turns_belong_to_the_prompt(write):
    end = {"role": "assistant", "content": "2"}
    row = {"chosen": [USER, ASSISTANT, USER, end], "rejected": [USER, end]}
    found = texts(pairs(write([row]), CHAT_TOKENIZER, prompt_key=None)[0], CHAT_TOKENIZER)
    assert found["chosen"][1] == "user: 1\nassistant: 1\nuser: 1\nassistant: "
    assert found["rejected"] == ("user: 1\nassistant: 2<eos>", "user: 1\nassistant: ")


def test_bad_pairs_are_named(write):
    fine = {"prompt": "1", "chosen": "2", "rejected": "3", "by": 0.5}
    for number, (change, message) in enumerate(
        [
            ({"rejected": None}, "column 'rejected' is null; expected a string, or a list"),
            ({"by": None}, "column 'by' is None; expected a finite number"),
            ({"prompt": None}, "column 'prompt' is null"),
            ({"chosen": "1234567890"}, "the response has 11 tokens, data.max_response_length is 8"),
        ]
    ):
        with pytest.raises(UserError, match=rf"(row 1|line 2): {message}"):
            pairs(write([fine, {**fine, **change}], str(number)), margin_key="by")
    with pytest.raises(UserError, match=r"no column 'margin' \(data.margin_key\)"):
        pairs(write([fine]), margin_key="margin")
    chats = {"prompt": "1", "chosen": [USER, ASSISTANT], "rejected": [USER]}
    with pytest.raises(UserError, match="column 'chosen' is a chat, but the prompt is str; make both the same"):
        pairs(write([chats], "mixed"), CHAT_TOKENIZER)
    with pytest.raises(UserError, match=r"column 'rejected' is list; .* the last is the assistant's"):
        pairs(write([chats], "last"), CHAT_TOKENIZER, prompt_key=None)


def test_a_batch_alternates_chosen_and_rejected(write):
    rows = [
        {"prompt": "21=", "chosen": "12", "rejected": "1", "by": 1.5},
        {"prompt": "7=", "chosen": "7", "rejected": "777", "by": 0},
    ]
    dataset = pairs(write(rows), margin_key="by", max_prompt_length=3)
    batch = collate_pairs([dataset[0], dataset[1]], pad_token_id=0, max_prompt_length=3, max_response_length=4)
    assert batch["margins"].tolist() == [1.5, 1.5, 0, 0]
    assert batch["response_mask"].sum(-1).tolist() == [3, 2, 2, 4]
    assert text_of(batch["responses"][3]) == "777<eos>" and torch.equal(batch["prompts"][0], batch["prompts"][1])


def test_truncated_pairs_are_counted_once(write):
    row = {"prompt": "12345", "chosen": "123456789", "rejected": "1"}
    dataset = pairs(write([row, row]), max_prompt_length=4, truncation="right")
    assert dataset.report.truncated == 2 and dataset.report.kept == 2


def test_the_fingerprint_is_of_both_sides_and_the_margins(write):
    fine = {"prompt": "1=", "chosen": "1", "rejected": "2", "by": 1.0}
    changes = ({}, {"prompt": "2="}, {"chosen": "3"}, {"rejected": "3"}, {"by": 2.0})
    files = [write([{**fine, **change}], str(number)) for number, change in enumerate((*changes, {}))]
    prints = [pairs(file, margin_key="by").fingerprint() for file in files]
    assert len(set(prints)) == len(changes) and prints[0] == prints[-1]
