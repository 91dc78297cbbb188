import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.utils.dataset_text import (
    ChatOptions,
    PromptEncoder,
    RowError,
    chat_messages,
    truncate_ids,
    use_chat_template,
)
from podium.utils.errors import UserError
from tests.utils.small_tokenizers import CHAT_TEMPLATE, char_tokenizer, text_of

CHAT_TOKENIZER = char_tokenizer(template=CHAT_TEMPLATE)


@given(st.lists(st.integers(), min_size=1), st.integers(1, 20), st.sampled_from(["left", "right", "middle"]))
def test_truncation_keeps_the_limit_and_the_right_ends(ids, limit, how):
    cut = truncate_ids(ids, limit, how)
    assert len(cut) == min(len(ids), limit)
    if how != "left":
        assert cut[0] == ids[0]
    if how != "right" and limit > 1:
        assert cut[-1] == ids[-1]


def test_the_system_prompt_goes_before_chats_that_have_none():
    chat = ChatOptions(system_prompt="be kind")
    user, system = {"role": "user", "content": "1"}, {"role": "system", "content": "be rude"}
    assert chat_messages([user], chat) == [{"role": "system", "content": "be kind"}, user]
    assert chat_messages([system, user], chat) == [system, user]
    encode = PromptEncoder(CHAT_TOKENIZER, "prompt", chat)
    [ids] = encode([[user]])
    assert text_of(ids, CHAT_TOKENIZER) == "system: be kind\nuser: 1\nassistant: "
    with pytest.raises(RowError, match=r"data.system_prompt can only go before a chat"):
        list(encode(["1+1="]))


def test_a_template_of_the_user_s_own(tmp_path):
    tokenizer = char_tokenizer()
    with pytest.raises(RowError, match=r"no chat template; .* data.chat_template"):
        list(PromptEncoder(tokenizer, "prompt")([[{"role": "user", "content": "1"}]]))
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}={% endif %}")
    use_chat_template(tokenizer, None, "data.chat_template")
    assert tokenizer.chat_template is None
    use_chat_template(tokenizer, str(file), "data.chat_template")
    [ids] = PromptEncoder(tokenizer, "prompt")([[{"role": "user", "content": "1"}]])
    assert text_of(ids, tokenizer) == "<1>="
    with pytest.raises(UserError, match=r"data.chat_template=.*nowhere: there is no such file"):
        use_chat_template(tokenizer, str(tmp_path / "nowhere"), "data.chat_template")


def test_rows_are_counted_from_the_first():
    with pytest.raises(RowError) as caught:
        list(PromptEncoder(CHAT_TOKENIZER, "prompt")(["1", None], first_row=7))
    assert caught.value.row == 8 and caught.value.reason.startswith("column 'prompt' is null")
