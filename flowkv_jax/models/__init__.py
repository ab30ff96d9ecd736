"""Models: what a checkpoint says (no JAX in these modules) and the Flax code that runs it.

config            the hyper-parameters of a Llama
registry          which architectures are served
source            one view over every kind of checkpoint: `open_model(...) -> ModelSource`
safetensors_file  reader of safetensors files, through a memory map
gguf_file         reader of GGUF files, through a memory map
gguf              a Llama in a GGUF file, under Hugging Face names
gguf_tokenizer    the tokenizer of a GGUF file
hub               models known by name: fetched once, then read offline
"""
