"""Models of round numbers, for tests of capacity and memory."""

from dataclasses import replace

from mlx_dp.proto.capacity.model_shape import ModelShape

GB = 10**9
DENSE = ModelShape(
    num_layers=2,
    attention_layers=2,
    auxiliary_layers=0,
    kv_bytes_per_token=1000,
    auxiliary_bytes_per_slot=0,
    vocab_size=100,
    context_length=4096,
    weights_nbytes=GB,
)
HYBRID = replace(DENSE, auxiliary_layers=1, auxiliary_bytes_per_slot=1_000_000)
