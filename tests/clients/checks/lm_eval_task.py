"""lm-eval's `local-completions` on two small tasks of our own: scores and generated text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checklist import require, require_equal, run_checks, surroundings
from tool import program, run_tool

QUESTIONS = [
    ("The capital of France is", ["Paris", "banana", "seven"], 0),
    ("The opposite of hot is", ["purple", "cold", "Tuesday"], 1),
    ("Two plus two equals", ["a horse", "green", "four"], 2),
    ("The sun rises in the", ["east", "fridge", "sock"], 0),
    ("Water freezes into", ["music", "ice", "paper"], 1),
    ("A dog is an", ["integer", "opera", "animal"], 2),
]
CHOICE_TASK = """
task: flowkv_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
GENERATE_TASK = """
task: flowkv_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n", "."], max_gen_toks: 12, do_sample: false}}
filter_list:
  - name: first
    filter: [{{function: take_first}}]
metric_list:
  - metric: exact_match
    ignore_case: true
"""
SCORE_TASK = """
task: flowkv_score
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}} {{{{choices[answer]}}}}"
metric_list: [{{metric: word_perplexity}}]
"""


def _write_tasks() -> Path:
    folder = Path(surroundings.scratch) / "tasks"
    folder.mkdir(exist_ok=True)
    data = folder / "questions.jsonl"
    rows = [{"question": q, "choices": c, "answer": a} for q, c, a in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, text in (("choice", CHOICE_TASK), ("generate", GENERATE_TASK), ("score", SCORE_TASK)):
        (folder / f"{name}.yaml").write_text(text.format(data=data), encoding="utf-8")
    return folder


def _evaluate(model: str, path: str, tasks: str, *more: str) -> tuple[dict[str, Any], Path]:
    output = Path(surroundings.scratch) / f"{model}-{tasks}"
    arguments = {
        "model": surroundings.model,
        "base_url": f"{surroundings.http}{path}",
        "tokenizer": surroundings.tokenizer,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_retries": 1,
        "max_length": 2048,
    }
    run_tool(
        [
            *(program("lm_eval"), "run", "--model", model, "--tasks", tasks),
            *("--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())),
            *("--include_path", str(_write_tasks()), "--batch_size", "1"),
            *("--output_path", str(output), "--log_samples", *more),
        ]
    )
    (results,) = output.rglob("results_*.json")
    return json.loads(results.read_text(encoding="utf-8"))["results"], output


def _samples(output: Path, task: str) -> list[dict[str, Any]]:
    (path,) = output.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def check_loglikelihood() -> None:
    results, output = _evaluate("local-completions", "/v1/completions", "flowkv_choice")
    require_equal(results["flowkv_choice"]["acc,none"], 1.0, "the accuracy")
    for sample in _samples(output, "flowkv_choice"):
        scores = [float(first[0]) for first, *_ in sample["resps"]]
        require(all(score < 0 for score in scores), f"log likelihoods: {scores}")
        require_equal(len(set(scores)), 3, "different scores of three choices")


def check_rolling_loglikelihood() -> None:
    results, _ = _evaluate("local-completions", "/v1/completions", "flowkv_score")
    perplexity = results["flowkv_score"]["word_perplexity,none"]
    require(2 < perplexity < 2000, f"word perplexity {perplexity}")


def check_generate() -> None:
    _, output = _evaluate("local-completions", "/v1/completions", "flowkv_generate")
    samples = _samples(output, "flowkv_generate")
    require_equal(len(samples), len(QUESTIONS), "answers")
    texts = [sample["resps"][0][0] for sample in samples]
    require(any("Paris" in text for text in texts), f"texts: {texts}")
    require(not any("." in text or "\n" in text for text in texts), f"beyond a stop: {texts}")


def check_generate_as_a_conversation() -> None:
    _, output = _evaluate(
        *("local-chat-completions", "/v1/chat/completions", "flowkv_generate"),
        "--apply_chat_template",
    )
    texts = [sample["resps"][0][0] for sample in _samples(output, "flowkv_generate")]
    require(all(texts), f"texts: {texts}")


if __name__ == "__main__":
    run_checks(__name__)
