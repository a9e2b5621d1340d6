"""The demo's tokenizer: byte-level BPE trained on the project's corpus, saved as a transformers tokenizer.

    python -m tide.training.tokenizer --text DIR --out DIR [--vocab-size 16384]

Byte-level, so that every text has an encoding. Text is split before merging by the rule that Llama 3
publishes with its tokenizer (the paper's, Table 7): letters with one leading non-letter, at most three
digits, runs of punctuation, runs of white space. One special token opens and closes a document, as in
the training stream; a second one pads.
"""

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tide.cli import ArgumentParser, UserError, run_command
from tide.training.corpus import read_documents

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DOCUMENT_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"


def train_tokenizer(documents: Iterator[str], vocab_size: int = 16_384) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer.

    Args:
        documents: texts; read once, in order.
        vocab_size: number of token ids, the 256 bytes and the two special tokens included.

    Returns:
        A fast tokenizer that puts `<|endoftext|>` before every text, since every document of the
        training stream begins so.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[DOCUMENT_TOKEN, PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(documents, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{DOCUMENT_TOKEN} $A",
        pair=f"{DOCUMENT_TOKEN} $A {DOCUMENT_TOKEN} $B",
        special_tokens=[(DOCUMENT_TOKEN, bpe.token_to_id(DOCUMENT_TOKEN))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=DOCUMENT_TOKEN,
        eos_token=DOCUMENT_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def main(argv: list[str] | None = None) -> int:
    """Command line of `python -m tide.training.tokenizer`."""
    parser = ArgumentParser(description="Train the demo's byte-level BPE tokenizer.")
    parser.add_argument("--text", type=Path, required=True, help="folder with train_*.txt files")
    parser.add_argument("--out", type=Path, required=True, help="folder to save the tokenizer in")
    parser.add_argument("--vocab-size", type=int, default=16_384, help="token ids in all")
    args = parser.parse_args(argv)

    files = sorted(args.text.glob("train_*.txt"))
    if not files:
        raise UserError(f"{args.text} holds no train_*.txt: run `python -m tide.training.corpus --out {args.text}`")
    tokenizer = train_tokenizer((doc for file in files for doc in read_documents(file)), args.vocab_size)
    tokenizer.save_pretrained(args.out)
    print(f"{len(tokenizer):,} token ids saved in {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
