"""What is learnt of a conversation is what the assistant wrote, and the token that ends its turn."""

import pytest

from podium.utils.chat_masks import AssistantMasks
from podium.utils.dataset_text import ChatOptions, PromptEncoder, RowError
from tests.utils.chat_templates import CHATML, TEMPLATES, THINKING, bpe_tokenizer

CONVERSATION = [
    {"role": "user", "content": "Sort the digits 5 1 2 please."},
    {"role": "assistant", "content": "Sorted, they are\n1 2 5."},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "five"},
]
ANSWERS = [message["content"] for message in CONVERSATION if message["role"] == "assistant"]


@pytest.mark.parametrize("family", TEMPLATES)
def test_only_the_assistant_s_turns(family):
    template, close = TEMPLATES[family]
    tokenizer = bpe_tokenizer(template)
    ids, mask = AssistantMasks(tokenizer, "messages")(0, CONVERSATION)
    assert ids == tokenizer.apply_chat_template(CONVERSATION, return_dict=True)["input_ids"]
    learnt = tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on])
    space = " " * (family == "mistral")  # belongs to the answer: the model generates it
    assert learnt == "".join(f"{space}{answer}{close}" for answer in ANSWERS)


@pytest.mark.parametrize("family", TEMPLATES)
def test_what_precedes_the_last_turn_is_the_prompt_of_rl(family):
    """Training and generation see the same tokens before the first one that the model writes."""
    tokenizer = bpe_tokenizer(TEMPLATES[family][0])
    ids, mask = AssistantMasks(tokenizer, "messages")(0, CONVERSATION[:2])
    [prompt] = PromptEncoder(tokenizer, "prompt")([CONVERSATION[:1]])
    assert ids[: mask.index(True)] == prompt


def test_options_reach_the_template_either_way():
    for template in (CHATML, TEMPLATES["chatml with marks"][0]):
        tokenizer = bpe_tokenizer("{{ head }}" + template)
        chat = ChatOptions({"head": "!"}, system_prompt="be brief")
        ids, _ = AssistantMasks(tokenizer, "messages", chat)(0, CONVERSATION[:2])
        assert tokenizer.decode(ids).startswith("!<|im_start|>system\nbe brief<|im_end|>")


def test_a_turn_that_depends_on_what_follows_is_refused():
    masks = AssistantMasks(bpe_tokenizer(THINKING), "messages")
    ids, mask = masks(0, CONVERSATION[:2])
    learnt = bpe_tokenizer(THINKING).decode([token for token, on in zip(ids, mask, strict=True) if on])
    assert learnt == f"<think>\n\n</think>\n\n{ANSWERS[0]}<|im_end|>"
    with pytest.raises(RowError, match=r"renders the assistant's message 1 differently when it stands last"):
        masks(0, CONVERSATION)


def test_a_token_of_both_is_refused_unless_it_is_white_space():
    merged = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    tokenizer = bpe_tokenizer(merged)
    tokenizer.backend_tokenizer.add_tokens(["assistants"])
    masks = AssistantMasks(tokenizer, "messages")
    with pytest.raises(RowError, match=r"the token 'assistants' is partly the template's"):
        masks(3, [{"role": "user", "content": "1"}, {"role": "assistant", "content": "s 2"}])
    chatml = bpe_tokenizer(CHATML)
    chatml.backend_tokenizer.add_tokens(["\n\n"])
    chat = [CONVERSATION[0], {"role": "assistant", "content": "\nfive"}]
    ids, mask = AssistantMasks(chatml, "messages")(0, chat)
    assert chatml.decode([token for token, on in zip(ids, mask, strict=True) if on]) == "five<|im_end|>"


def test_nothing_to_learn_and_templates_that_refuse():
    masks = AssistantMasks(bpe_tokenizer(CHATML), "messages")
    with pytest.raises(RowError, match="no assistant turn to learn"):
        masks(0, CONVERSATION[:1])
    with pytest.raises(RowError, match="begins with the assistant"):
        masks(0, CONVERSATION[1:])
    with pytest.raises(RowError, match="no chat template"):
        AssistantMasks(bpe_tokenizer(""), "messages")(0, CONVERSATION)
    for template in ("{{ raise_exception('no') }}", TEMPLATES["chatml with marks"][0] + "{{ raise_exception('no') }}"):
        with pytest.raises(RowError, match=r"refuses column 'messages' \(no\)"):
            AssistantMasks(bpe_tokenizer(template), "messages")(0, CONVERSATION)
