"""UltraFeedback (binarized): pairs with score margins for reward models, or the chosen conversations for SFT.

    python examples/data_preprocess/ultrafeedback.py --out data/ultrafeedback [--sft] [--source FOLDER_OR_HUB_NAME]

Pairs are for main_rm with data.prompt_key=null data.margin_key=margin, conversations for main_sft with
data.messages_key=messages. Pairs of equal conversations are left out, and counted.
"""

from __future__ import annotations

import sys

from common import Row, arguments, load, write


def pair_of(row: Row, index: int) -> Row | None:
    """Chosen and rejected as chats, and by how much the first was rated higher."""
    if row["chosen"] == row["rejected"]:
        return None
    margin = float(row["score_chosen"]) - float(row["score_rejected"])
    return {
        "chosen": row["chosen"],
        "rejected": row["rejected"],
        "margin": margin,
        "data_source": "HuggingFaceH4/ultrafeedback_binarized",
        "extra_info": {"index": index},
    }


def conversation_of(row: Row, index: int) -> Row:
    """The better conversation."""
    return {"messages": row["messages"], "extra_info": {"index": index}}


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, "HuggingFaceH4/ultrafeedback_binarized")
    parser.add_argument("--sft", action="store_true", help="conversations for main_sft instead of pairs")
    args = parser.parse_args(argv)
    kind, make = ("sft", conversation_of) if args.sft else ("prefs", pair_of)
    for split in ("train", "test"):
        write(split, load(args.source, None, f"{split}_{kind}", args.limit), make, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
