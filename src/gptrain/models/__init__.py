"""Nets that gptrain trains, and the contract between a net and the rest of the library.

The modules of this package use PyTorch and no Lightning, Hydra or torch.distributed. Only
`HuggingFace` needs another package, transformers.

A net is any `nn.Module` with the method

    forward(tokens: (B, T) int64) -> logits (B, T, V)

Nothing else is required: such a net trains on one device and under DDP. Each of the following
attributes is optional and enables a feature. If a feature needs an attribute that the net lacks,
an error names the attribute before training begins.

`hidden(tokens) -> (B, T, D)`, `head: nn.Linear(D, V, bias=False)`, with `forward == head(hidden)`
    The chunked loss, which never holds the logits of the full batch in memory.
`blocks: nn.ModuleList`
    FSDP2, activation checkpointing and torch.compile for each block, and the Muon optimizer.
`embed(tokens) -> (B, T, D)` and `norm`, with `forward == head(norm(blocks(embed)))`
    Pipeline parallelism.
`tensor_plan: ClassVar[dict[str, str]]`, from a pattern of submodule names to a role, and `n_heads`
    Tensor parallelism. The projections of q, k and v must be separate layers, and attention must
    compute the number of heads from their output, `q(x).unflatten(-1, (-1, d_head))`, because each
    rank has only some of the heads. It must be causal, because ranks pad a sequence at its end.
`context_plan: ClassVar[tuple[str, ...]]`, patterns of submodule names, and `n_heads`
    Context parallelism, in which a rank computes a part of every sequence. The patterns, matched by
    `fnmatch`, name all modules whose output at a position depends on positions before it; on later
    ones none may depend. Each has an attribute `exchange` of None. If it is set, the module passes
    q, k and v of the T positions of this rank, each (B, T, heads, d_head), through
    `exchange.to_heads(q, k, v)`, which returns all S positions of some heads, each (B, S, heads of
    this rank, d_head). It computes attention over these, and passes the result through
    `exchange.to_positions(y)`, which returns all heads of the T positions. All ranks of the
    sequence must call both. `forward` and `hidden` accept the argument `layout` (see below). Its
    positions are those of the `tokens` of this rank, its documents are those of all positions.
`init_parameter(name, tensor)`
    Construction on the meta device and initialization of one parameter at a time.
`to_hugging_face() -> (config, tensors)` and `from_hugging_face(config, tensors) -> state dict`
    Export to folders of Hugging Face transformers, and training that starts from such a folder. Of
    a parameter with several names, such as that of a tied head, the first name is written and read.
`to_peft() -> (config, tensors)`
    Export of adapters to a folder of peft.
`forward(tokens, cache=None)` and `new_cache() -> KVCache` (see attention.py)
    Generation that computes each position once. With a cache, `tokens` are the new positions only.
`forward(tokens, layout=None)`, and the same argument of `hidden` and, for pipelines, of `embed` and
of each block
    Packed documents that do not see each other, `data.documents=masked`. The `SequenceLayout` (see
    attention.py) has the position of each token in its document and the index of the document.
    The argument is only passed if the samples have documents.
`vocab_size` and `max_seq_len`
    A check that the data fits the net, before training begins.

Nets of other classes than those of this package, and subclasses of them, are compared with the
unmodified net before the first step if the strategy partitions the net, if the loss is chunked or
if activation checkpointing is on (see gptrain/parallel/compare.py). If the logits or gradients
of a small batch differ, the run ends with an error, also if the cause is activation checkpointing
of blocks that change buffers. If only `hidden` and `head` differ from `forward`, also in training
alone, the loss is computed from the logits of `forward`.

Buffers that change in training, such as the running averages of BatchNorm, are updated by each rank
with its own samples. After each step all data-parallel ranks take the buffers of the first of them.
BatchNorm normalizes by the samples of its own rank. The losses of such a net on several ranks
therefore differ from those of one process.

Roles of `tensor_plan`, whose patterns are matched by `fnmatch`. Every net needs layers with the
roles `vocab_embedding` (the token embedding, which splits the activations into shards of the
sequence), `sequence` (the norm in front of each split layer, which gathers them) and `vocab_head`:

`colwise`: a linear layer whose outputs are split over the ranks.
`rowwise`: a linear layer whose inputs are split over the ranks; the partial results are summed.
`vocab_embedding`: a token embedding whose rows are split over the ranks.
`vocab_head`: a head whose outputs are split over the ranks.
`sequence`: a layer that computes each position separately, such as the norm before a split layer.
    It may get a part of the sequence.
`position_embedding`: a position embedding, which also may get a part of the positions.
`per_head`: a layer that computes each head separately, such as a norm of q or k. It gets the heads
    of one rank.

`init_parameter` fills one full (unsharded) parameter in place. The values must depend only on the
name of the parameter, its shape and the seed that the net drew in its constructor. Then the same
seed gives the same weights on every device, under every sharding and in every order of the calls.
"""

from gptrain.models.hugging_face import HuggingFace
from gptrain.models.llama import Llama
from gptrain.models.simple_gpt import SimpleGPT

__all__ = ["HuggingFace", "Llama", "SimpleGPT"]
