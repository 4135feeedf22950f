"""Private parts of torch that the sharding search needs, imported here and nowhere else.

Each name was seen in torch 2.13.0. DTensor's sharding rules have no public reader; a public
replacement would be a function from an operator and its argument shapes to allowed placements.
"""

from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder

ShardingPlaceholder = _ShardingPlaceholder
sharding_propagator = DTensor._op_dispatcher.sharding_propagator

__all__ = [
    "DTensorSpec",
    "OpOverload",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "ShardingPlaceholder",
    "TensorMeta",
    "TupleStrategy",
    "sharding_propagator",
]
