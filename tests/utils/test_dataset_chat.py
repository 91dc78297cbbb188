import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podium.utils.dataset_chat import ChatDataset, PackedDataset, collate_documents, first_fit
from podium.utils.errors import UserError
from tests.utils.chat_templates import CHATML, bpe_tokenizer

TOKENIZER = bpe_tokenizer(CHATML)
PAD = TOKENIZER.pad_token_id


def chat(*contents: str) -> dict:
    roles = ("user", "assistant") * len(contents)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]}


def test_rows_and_limits(write):
    file = write([chat("one", "two"), chat("What is the sum of two and three?", "five")])
    dataset = ChatDataset(file, TOKENIZER, max_length=64)
    lengths = [len(dataset[i]["input_ids"]) for i in range(2)]
    assert lengths[0] < lengths[1] and not dataset[0]["loss_mask"][0]
    with pytest.raises(UserError, match=rf"(row 1|line 2): the conversation has {lengths[1]} tokens, data.max_length"):
        ChatDataset(file, TOKENIZER, max_length=lengths[0])
    left = ChatDataset(file, TOKENIZER, max_length=lengths[0], truncation="left")
    assert left.report.truncated == 1 and len(left[1]["input_ids"]) == lengths[0]
    assert left[1]["input_ids"] == dataset[1]["input_ids"][-lengths[0] :]
    right = ChatDataset(file, TOKENIZER, max_length=lengths[0], truncation="right")
    assert (right.report.kept, right.report.dropped) == (1, 1), "only the answer of the first is within the limit"
    with pytest.raises(UserError, match="no conversation has an assistant's token within max_length"):
        ChatDataset(file, TOKENIZER, max_length=3, truncation="right")


def test_bad_rows_are_named(write):
    for number, bad in enumerate(({"messages": None}, {"messages": [{"content": "x"}]}, chat("x"))):
        with pytest.raises(UserError, match=r"(row 1|line 2): column 'messages'"):
            ChatDataset(write([chat("one", "two"), bad], str(number)), TOKENIZER, max_length=64)
    with pytest.raises(UserError, match=r"no column 'chats' \(data.messages_key\)"):
        ChatDataset(write([chat("one", "two")]), TOKENIZER, messages_key="chats", max_length=64)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_packing_puts_each_document_in_one_row_and_wastes_little(lengths):
    bins = first_fit(np.array(lengths), 20)
    assert sorted(i for row in bins for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 20 for row in bins)
    fewest = -(-sum(lengths) // 20)
    half_full = sum(sum(lengths[i] for i in row) <= 10 for row in bins)
    assert half_full <= 1 and len(bins) <= 2 * fewest


def document(*ids: int, learnt: int) -> dict:
    return {"input_ids": list(ids), "loss_mask": [False] * (len(ids) - learnt) + [True] * learnt}


def test_the_layout_of_packed_and_unpacked_rows():
    rows = [[document(5, 6, 7, learnt=1), document(8, 9, learnt=2)], [document(4, learnt=0)]]
    batch = collate_documents(rows, PAD, 7, packed=True)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, PAD, PAD], [4] + [PAD] * 6]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 3, 4, 5]]
    assert batch["response_mask"].tolist() == [[False, True, False, True, False, False], [False] * 6]
    assert batch["attention_mask"].all()
    plain = collate_documents([rows[0][:1]], PAD, 4, packed=False)
    assert plain["attention_mask"].tolist() == [[True, True, True, False]]
    assert plain["responses"].tolist() == [[6, 7, PAD]] and plain["prompts"].tolist() == [[5]]


def test_a_packed_data_set_says_how_full_it_is(write):
    dataset = ChatDataset(write([chat("one", "two")] * 5), TOKENIZER, max_length=64)
    length = len(dataset[0]["input_ids"])
    packed = PackedDataset(dataset, PAD, 2 * length)
    assert len(packed) == 3 and "packed into 3 rows" in packed.report and "83% full" in packed.report
    batch = packed.collate([packed[0], packed[2]])
    assert torch.equal(batch["input_ids"][0, :length], batch["input_ids"][1, :length])
