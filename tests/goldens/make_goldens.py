"""Make the golden files of this folder with Hugging Face transformers in float32 on the CPU.

Run by hand, in an environment with torch, transformers, gguf and ml_dtypes; tests need none of it:

    python tests/goldens/make_goldens.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --tokenizer FOLDER

where FOLDER holds the model's tokenizer.json and tokenizer_config.json (from HuggingFaceTB/
SmolLM2-135M-Instruct, or converted from the GGUF file: the same data). transformers reads the GGUF
file by its own code, so the goldens also check ours. Files:

    smollm2.json    prompts of the real model: token ids, 64 greedy tokens (end of sequence does not
                    stop them), and the narrowest margin between first and second choice
    smollm2.npz     name -> logits of the last prompt position, float32 [V]
    tiny.json       the same for the variants of tests/tiny_models.py, 32 greedy tokens
    tiny.npz        variant -> logits of the positions in `TINY_POSITIONS`, float32 [positions, V]
    tokenizer.json  text -> ids and text again, and conversations -> prompts, for both tokenizers
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from tests.tiny_models import TINY_VARIANTS, VOCAB_SIZE, write_tiny_model  # noqa: E402

NUM_GREEDY = 64
NUM_TINY_GREEDY = 32
TINY_PROMPT_TOKENS = 100
TINY_POSITIONS = (0, 1, 15, 16, 17, 63, 64, 99)

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
LONG = "\n".join(
    f"Entry {i}: on day {i * 7 % 30 + 1} the {animal} crossed the {place} and met {i + 2} others."
    for i, (animal, place) in enumerate(
        (animal, place)
        for animal in ("fox", "heron", "otter", "badger", "hare")
        for place in ("river", "meadow", "old bridge", "northern forest", "village square")
    )
)
PROMPTS: dict[str, str | list[dict[str, str]]] = {
    "chat_capital": CAPITAL,
    "chat_system": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Because air scatters blue light more than red."},
        {"role": "user", "content": "And why is the sunset red?"},
    ],
    "code": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "digits": "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233,",
    "unicode": "Zürich, Łódź, 東京 and Αθήνα are cities 🏙️. The first one lies in",
    "one_token": "The",
    "story": "Once upon a time, in a small house by the sea, there lived an old clockmaker who",
    "long": LONG + "\nSummary:",
}

TEXTS = (
    "",
    " ",
    "  \n\n\t x",
    "Hello, world!",
    "hello  world   three",
    "I'm, you're, we'll, they'd, it's, I've DON'T",
    "1234567890 12 3.14159 1,000,000",
    "a1b22c333",
    "٣٤٥ ½ Ⅷ ²",
    "Größe Straße naïve café",
    "cafe\u0301 vs caf\u00e9",
    "日本語のテキスト、中文文本。",
    "한국어 텍스트",
    "Привет, мир! Ελληνικά עברית العربية हिन्दी",
    "😀👍🏽👨‍👩‍👧‍👦🏳️‍🌈",
    "\u200b\u00a0\ufeff\u2028x",
    "def f(x):\n\treturn x ** 2  # comment\n",
    "for (int i = 0; i < 10; ++i) { a[i] += 1; }",
    "https://example.org/path?query=1&other=%20#fragment",
    "<|im_start|>user\nhi<|im_end|>\n",
    "text <|endoftext|> more",
    "<|im_start",
    "A" * 100,
    "aAaAaA bBbB",
    "\r\n\r\n mixed \r endings \n",
    "\x00\x01\x7f",
    "...---... !!! ??? ***",
    "𝕳𝖊𝖑𝖑𝖔 ﷺ ǅ",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    " leading and trailing ",
    "ends with newline\n",
)
CONVERSATIONS = (
    CAPITAL,
    PROMPTS["chat_system"],
    [{"role": "user", "content": "  spaces \n and 12 lines\n\n"}],
    [{"role": "system", "content": "Be <b>brief</b> & kind."}, {"role": "user", "content": "é"}],
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(Path(folder))
        make_tokenizer(tokenizer, Path(folder))
    make_smollm2(arguments.gguf, tokenizer)


def make_smollm2(gguf: Path, tokenizer: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    entries, logits = {}, {}
    for name, prompt in PROMPTS.items():
        if not isinstance(prompt, str):
            prompt = tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer.encode(prompt)
        prompt_logits, greedy, margin = run(model, ids, NUM_GREEDY)
        logits[name] = prompt_logits[-1]
        entries[name] = {"prompt": prompt, **entry(ids, greedy, margin)}
        print(f"{name}: {len(ids)} tokens, margin {margin:.4f}: {tokenizer.decode(greedy)[:70]!r}")
    np.savez_compressed(HERE / "smollm2.npz", **logits)
    write_json("smollm2.json", entries)


def make_tiny(folder: Path) -> None:
    entries, logits = {}, {}
    for number, variant in enumerate(TINY_VARIANTS):
        path = write_tiny_model(folder / variant, variant)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        draw = np.random.RandomState(number)
        ids = draw.randint(3, VOCAB_SIZE, TINY_PROMPT_TOKENS).tolist()
        prompt_logits, greedy, margin = run(model, ids, NUM_TINY_GREEDY)
        logits[variant] = prompt_logits[list(TINY_POSITIONS)]
        entries[variant] = {"positions": TINY_POSITIONS, **entry(ids, greedy, margin)}
        print(f"{variant}: margin {margin:.4f}")
    np.savez_compressed(HERE / "tiny.npz", **logits)
    write_json("tiny.json", entries)


@torch.no_grad()
def run(model: Any, ids: Sequence[int], num_greedy: int) -> tuple[np.ndarray, list[int], float]:
    """(logits of every prompt position, greedy tokens, narrowest margin of a choice)."""
    output = model(torch.tensor([list(ids)]), use_cache=True)
    prompt_logits = output.logits[0].float().numpy()
    greedy: list[int] = []
    margin = np.inf
    while True:
        best = output.logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        greedy.append(int(best.indices[0]))
        if len(greedy) == num_greedy:
            return prompt_logits, greedy, margin
        output = model(
            torch.tensor([greedy[-1:]]), past_key_values=output.past_key_values, use_cache=True
        )


def entry(ids: Sequence[int], greedy: Sequence[int], margin: float) -> dict[str, Any]:
    return {
        "prompt_token_ids": list(ids),
        "greedy_token_ids": list(greedy),
        "narrowest_margin": round(margin, 5),
    }


def make_tokenizer(smollm2: Any, folder: Path) -> None:
    tiny = transformers.AutoTokenizer.from_pretrained(
        write_tiny_model(folder / "tokenizer", next(iter(TINY_VARIANTS)))
    )
    write_json(
        "tokenizer.json",
        {
            name: {
                "texts": [text_entry(tokenizer, text) for text in TEXTS],
                "conversations": [
                    {
                        "messages": messages,
                        "add_generation_prompt": add_generation_prompt,
                        "prompt": tokenizer.apply_chat_template(
                            messages, tokenize=False, add_generation_prompt=add_generation_prompt
                        ),
                    }
                    for messages in CONVERSATIONS
                    for add_generation_prompt in (True, False)
                ],
            }
            for name, tokenizer in (("smollm2", smollm2), ("tiny", tiny))
        },
    )


def text_entry(tokenizer: Any, text: str) -> dict[str, Any]:
    ids = tokenizer.encode(text)
    return {
        "text": text,
        "ids": ids,
        "decoded": tokenizer.decode(ids, skip_special_tokens=False),
        "decoded_without_special": tokenizer.decode(ids, skip_special_tokens=True),
    }


def write_json(name: str, value: Any) -> None:
    text = json.dumps(value, indent=None, separators=(",", ":"))
    # One entry a line: a change shows as the entries that changed.
    text = text.replace('},"', '},\n"').replace('},{"', '},\n{"')
    (HERE / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
