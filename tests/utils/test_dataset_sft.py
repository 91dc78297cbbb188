import pytest

from podium.utils.dataset_sft import SFTDataset, collate_sft
from podium.utils.errors import UserError
from tests.utils.small_tokenizers import CHAT_TEMPLATE, char_tokenizer, text_of

TOKENIZER = char_tokenizer()
CHAT_TOKENIZER = char_tokenizer(template=CHAT_TEMPLATE)


def sft(file, tokenizer=TOKENIZER, **kwargs):
    limits = {"max_prompt_length": 8, "max_response_length": 8, **kwargs}
    return SFTDataset(file, tokenizer, **limits)


def test_a_pair_is_prompt_response_and_end(write):
    dataset = sft(write([{"prompt": "21=", "response": "12"}]))
    row = dataset[0]
    assert text_of(row["input_ids"]) == "21=12<eos>"
    assert row["prompt_length"] == 3


def test_chat_prompts_other_columns_and_a_response_that_ends_itself(write):
    rows = [{"q": [{"role": "user", "content": "2"}], "a": "3<eos>"}]
    dataset = sft(write(rows), CHAT_TOKENIZER, prompt_key="q", response_key="a", max_prompt_length=50)
    assert text_of(dataset[0]["input_ids"]) == "user: 2\nassistant: 3<eos>"
    assert dataset[0]["prompt_length"] == len("user: 2\nassistant: ")


def test_overlong_pairs(write):
    file = write([{"prompt": "12345=", "response": "1"}, {"prompt": "1=", "response": "123456"}])
    with pytest.raises(UserError, match=r"the prompt has 6 tokens, data.max_prompt_length is 5"):
        sft(file, max_prompt_length=5)
    with pytest.raises(UserError, match=r"(row 1|line 2): the response has 7 tokens, data.max_response_length is 4"):
        sft(file, max_response_length=4)
    right = sft(file, max_response_length=4, truncation="right")
    assert text_of(right[1]["input_ids"]) == "1=1234"  # no end: it was cut
    assert right.report.truncated == 1
    assert text_of(sft(file, max_prompt_length=5, truncation="left")[0]["input_ids"]) == "2345=1<eos>"


def test_bad_pairs_are_named(write):
    with pytest.raises(UserError, match=r"no column 'response' \(data.response_key\); it has prompt, answer"):
        sft(write([{"prompt": "1", "answer": "1"}]))
    with pytest.raises(UserError, match=r"(row 1|line 2): column 'response' is null"):
        sft(write([{"prompt": "1", "response": "1"}, {"prompt": "1", "response": None}]))


def test_collated_pairs_have_the_layout_of_ppo_batches(write):
    dataset = sft(write([{"prompt": "21=", "response": "12"}, {"prompt": "4321=", "response": ""}]))
    batch = collate_sft([dataset[0], dataset[1]], pad_token_id=0, max_prompt_length=6, max_response_length=4)
    shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
    assert shapes == {
        "prompts": (2, 6),
        "responses": (2, 4),
        "response_mask": (2, 4),
        "input_ids": (2, 10),
        "attention_mask": (2, 10),
        "position_ids": (2, 10),
    }
    assert batch["response_mask"].tolist() == [[True, True, True, False], [True, False, False, False]]
    assert batch["attention_mask"].int().tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 0, 0, 0, 1, 2, 3, 4, 5, 5], [0, 0, 1, 2, 3, 4, 5, 5, 5, 5]]
    for row in range(2):
        assert batch["input_ids"][row][batch["attention_mask"][row]].tolist() == dataset[row]["input_ids"]
    assert (batch["input_ids"][~batch["attention_mask"]] == 0).all()
