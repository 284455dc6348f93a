"""What is learned. Plain torch: no lightning, no hydra, no torch.distributed.

A net is any `nn.Module` with

    forward(tokens: (B, T) int64) -> logits (B, T, V)

and nothing else is required: it trains on one device and under DDP. Each optional attribute opens
more, and what a net lacks is named in the error of the strategy that needs it:

`hidden(tokens) -> (B, T, D)`, and `head: nn.Linear(D, V, bias=False)`, `forward == head(hidden)`
    the chunked loss, which never holds the logits whole
`blocks: nn.ModuleList`
    FSDP2 by block, activation checkpointing, compiling by block, Muon
`embed(tokens) -> (B, T, D)` and `norm`, with `forward == head(norm(blocks(embed)))`
    pipeline parallelism
`tensor_plan: ClassVar[dict[str, str]]`, pattern of a submodule's name -> role, and `n_heads`
    tensor parallelism. q, k and v are layers of their own, and attention reads the number of heads
    off their width: `q(x).unflatten(-1, (-1, d_head))`. A rank has only some of the heads.
`init_parameter(name, tensor)`
    construction on the meta device, one parameter at a time
`to_hugging_face() -> (config, tensors)` and `from_hugging_face(config, tensors) -> state dict`
    export to, and a start from, folders of transformers
`forward(tokens, cache=None)` and `new_cache() -> KVCache` (see cache.py)
    generation that computes each position once; with a cache, tokens are the new positions only
`vocab_size`, `max_seq_len`
    a check against the data before anything starts

A net of another class than those below, a subclass of one included, is compared at the start of a
run with the same net on one device: logits and gradients of a small batch (parallel/comparison.py).
A difference ends the run with one line that names the module that differs first.

Roles of `tensor_plan` (names match by `fnmatch`):
`colwise` splits a linear layer's outputs, `rowwise` its inputs and sums the partial results,
`vocab_embedding` splits the rows of the token table, `vocab_head` the outputs of the head,
`sequence` (a norm before a split layer) works on each position alone, so that it may be given a
slice of the sequence; `position_embedding` likewise looks up a slice of the positions; `per_head`
(a norm of q or k, after a layer split by heads) works on each head alone.

`init_parameter` fills one whole parameter in place, a pure function of its name and of the seed
that the net drew when it was made: the same seed gives the same weights whatever device or shard
they are made on, in whatever order.
"""

from gptrain.models.hugging_face import HuggingFace
from gptrain.models.llama import Llama
from gptrain.models.simple_gpt import SimpleGPT

__all__ = ["HuggingFace", "Llama", "SimpleGPT"]
