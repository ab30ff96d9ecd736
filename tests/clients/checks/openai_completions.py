"""`/v1/completions` through the `openai` package."""

from __future__ import annotations

from typing import Any

import openai
from checklist import require, require_equal, run_checks, surroundings

MODEL = surroundings.model
CLIENT = openai.OpenAI(
    base_url=f"{surroundings.http}/v1", api_key="not needed", max_retries=0, timeout=120
)
PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}


def _text(**settings: Any) -> str:
    return CLIENT.completions.create(**{**GREEDY, "prompt": PROMPT, **settings}).choices[0].text


def _post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    root = CLIENT.with_options(base_url=surroundings.http)
    return root.post(path, body=body, cast_to=dict[str, Any])


def check_answer() -> None:
    answer = CLIENT.completions.create(**GREEDY, prompt=PROMPT)
    (choice,) = answer.choices
    require_equal(answer.object, "text_completion", "object")
    require("Paris" in choice.text, f"answer: {choice.text!r}")
    require(not choice.text.startswith(PROMPT), "the prompt was echoed unasked")
    require_equal(answer.usage.completion_tokens, 12, "completion_tokens")


def check_stream_is_the_answer_in_pieces() -> None:
    chunks = list(CLIENT.completions.create(**GREEDY, prompt=PROMPT, stream=True))
    require_equal("".join(c.choices[0].text for c in chunks), _text(), "the streamed text")
    require_equal(chunks[-1].choices[0].finish_reason, "length", "the last finish_reason")


def check_prompt_in_every_form() -> None:
    ids = _post("/tokenize", {"model": MODEL, "prompt": PROMPT})["tokens"]
    text = _text()
    require_equal(_text(prompt=ids), text, "the answer to token ids")
    for prompt in ([PROMPT, "Once upon a time"], [ids, ids[:2]]):
        answer = CLIENT.completions.create(**GREEDY, prompt=prompt)
        require_equal([c.index for c in answer.choices], [0, 1], "indexes of two prompts")
        require_equal(answer.choices[0].text, text, "the first prompt's answer")
        require_equal(answer.usage.completion_tokens, 24, "completion_tokens of both")
    require_equal(CLIENT.completions.create(**GREEDY, prompt=[ids]).choices[0].text, text, "[ids]")


def check_several_answers_to_several_prompts() -> None:
    wanted: dict[str, Any] = {**GREEDY, "temperature": 1, "seed": 3, "n": 2}
    prompts = [PROMPT, "Once upon a time"]
    answer = CLIENT.completions.create(**wanted, prompt=prompts)
    require_equal([choice.index for choice in answer.choices], [0, 1, 2, 3], "indexes")
    pieces = [""] * 4
    for chunk in CLIENT.completions.create(**wanted, prompt=prompts, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    require_equal(pieces, [choice.text for choice in answer.choices], "streamed texts")


def check_logprobs() -> None:
    (choice,) = CLIENT.completions.create(**GREEDY, prompt=PROMPT, logprobs=2).choices
    logprobs = choice.logprobs
    require_equal(len(logprobs.tokens), 12, "tokens")
    require_equal("".join(logprobs.tokens), choice.text, "the tokens joined")
    require(all(value <= 0 for value in logprobs.token_logprobs), "a logprob above 0")
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        require(len(top) >= 2, f"top_logprobs: {top}")
        require_equal(top.get(token), value, f"the logprob of {token!r} among the top")
    offsets = [sum(map(len, logprobs.tokens[:i])) for i in range(12)]
    start = logprobs.text_offset[0]
    require_equal([o - start for o in logprobs.text_offset], offsets, "text_offset")


def check_echo_scores_the_prompt() -> None:
    prompt_tokens = CLIENT.completions.create(**GREEDY, prompt=PROMPT).usage.prompt_tokens
    for max_tokens in (0, 1):
        answer = CLIENT.completions.create(
            model=MODEL, prompt=PROMPT, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
        )
        logprobs = answer.choices[0].logprobs
        require(answer.choices[0].text.startswith(PROMPT), f"text: {answer.choices[0].text!r}")
        require_equal(len(logprobs.tokens), prompt_tokens + max_tokens, "tokens with logprobs")
        require_equal(logprobs.token_logprobs[0], None, "the first token's logprob")
        require(all(value <= 0 for value in logprobs.token_logprobs[1:]), "a logprob above 0")
        require_equal("".join(logprobs.tokens), answer.choices[0].text, "the tokens joined")
        require_equal(logprobs.text_offset[0], 0, "the first offset")
        require_equal(answer.usage.completion_tokens, max_tokens, "completion_tokens")


def check_stop_seed_and_penalties() -> None:
    require_equal(_text(stop="Paris"), _text().split("Paris")[0], "the text before the stop")
    hot = {"temperature": 1.2, "max_tokens": 20}
    require_equal(_text(**hot, seed=5), _text(**hot, seed=5), "the same seed's text")
    require(_text(**hot, seed=5) != _text(**hot, seed=6), "two seeds give one text")
    _text(presence_penalty=1.5, frequency_penalty=-0.5, top_p=0.9, user="somebody")
    text = _text(extra_body={"min_tokens": 10, "top_k": 5, "stop_token_ids": [2]})
    require(text, "no text with extra fields")


def check_refused() -> None:
    for name, value in (
        ("suffix", "the end"),
        ("best_of", 1),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [10**9]),
        ("prompt", 3),
        ("logprobs", 10**6),
        ("logit_bias", {"1": 1e9}),
    ):
        settings = {
            **GREEDY,
            "prompt": PROMPT,
            name: value,
            **({"n": 2} if name == "best_of" else {}),
        }
        try:
            CLIENT.completions.create(**settings)
        except openai.BadRequestError as error:
            require_equal(error.type, "invalid_request_error", f"type for {name}={value!r}")
        else:
            require(False, f"{name}={value!r} was accepted")


def check_constraints() -> None:
    for constraint, is_met in (
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"regex": "[0-9]{3}-[a-f]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
        ({"grammar": 'start: "a" ("b" | "c") "d"'}, lambda text: text in ("abd", "acd")),
    ):
        text = _text(extra_body={"structured_outputs": constraint}, max_tokens=30)
        require(is_met(text), f"{constraint} gave {text!r}")


def check_tokenize_and_back() -> None:
    tokens = _post("/tokenize", {"model": MODEL, "prompt": "Hello wörld"})
    require_equal(tokens["count"], len(tokens["tokens"]), "count")
    require(isinstance(tokens.get("max_model_len"), int), "no max_model_len")
    text = _post("/detokenize", {"model": MODEL, "tokens": tokens["tokens"]})
    require_equal(text["prompt"], "Hello wörld", "the text of the ids")
    chat = _post("/tokenize", {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]})
    require(chat["count"] > 2, "a conversation has hardly a token")


if __name__ == "__main__":
    run_checks(__name__)
