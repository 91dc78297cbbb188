"""Real tokenizers, made on the spot."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz=+-*/<>|: \n"
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.name is defined %}{{ m.name }}|{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if think is defined %}{{ think }}{% endif %}{% endif %}"
)


def char_tokenizer(*, template: str | None = None, pad: bool = True, bos: bool = False, close: bool = False):
    """One token a character. `bos` opens every text with a token of its own, `close` ends it with end-of-sequence."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*special, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    if bos or close:
        single = f"{'<bos> ' * bos}$A{' <eos>' * close}"
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(token, vocabulary[token]) for token in ("<bos>", "<eos>")]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>" if pad else None,
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        padding_side="right",
    )
    tokenizer.chat_template = template
    return tokenizer


def text_of(ids, tokenizer=None):
    """What the tokens say, special ones included."""
    return (tokenizer or char_tokenizer()).decode(ids, skip_special_tokens=False)
