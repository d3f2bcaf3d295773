"""Models: plain `torch.nn`, written for one device. None of them knows about ranks, meshes or precision.

A model maps images (B, C, H, W) to logits (B, K), or token ids (B, T) to logits (B, T, V). Beyond `forward`, those of
this package offer three methods that a model of your own may offer too, all optional:

`init_parameter(name, tensor, generator)`
    Fills `tensor`, the full parameter called `name` in `named_parameters()`, in place, with draws from `generator`
    only. The model can then be created on the meta device, and its initial weights depend on the seed but not on the
    sharding.
`init_buffers()`
    Computes every buffer anew, in place: after a start on the meta device they hold nothing.
`sharding_blocks()`
    The repeated blocks that fully sharded data parallelism gathers one at a time; may be empty.

Constructing a model leaves the weights as `torch.nn` draws them; `init_parameter` gives those that training starts
from.
"""
