"""Architectures are served by name or refused by name."""

from __future__ import annotations

import pytest

from flowkv_jax.errors import ModelFormatError
from flowkv_jax.models import registry


def test_llama_is_served_under_both_names() -> None:
    llama = registry.from_hf_names(["LlamaForCausalLM"])
    assert registry.from_gguf_name("llama") is llama
    assert registry.from_hf_names(["SomethingElse", "LlamaForCausalLM"]) is llama


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM", [1], {}])
def test_a_folder_must_name_its_architecture(names: object) -> None:
    with pytest.raises(ModelFormatError, match="must name the model's architecture"):
        registry.from_hf_names(names)  # type: ignore[arg-type]


def test_others_are_refused_with_the_list_of_what_is_served() -> None:
    with pytest.raises(ModelFormatError, match=r"'Qwen3ForCausalLM'.*served: LlamaForCausalLM"):
        registry.from_hf_names(["Qwen3ForCausalLM"])
    with pytest.raises(ModelFormatError, match=r"'qwen3' is not served; served: llama"):
        registry.from_gguf_name("qwen3")
