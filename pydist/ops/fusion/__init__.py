"""Fusion of two calls into one pass over memory: the first call's result is deferred until used.

Each entry is the action on a deferred result (`pydist.tensor.deferred`) when a call uses it.
"Apart" is torch's own call on the completed result.

| deferred       | made by       | ReLU in place  | PReLU    | average pool | other use   |
|----------------|---------------|----------------|----------|--------------|-------------|
| `NOTHING`      | calls         | apart          | apart    | apart        | as it is    |
| `ConvOutputs`  | convolution   | `DeferredRelu` | apart    | apart        | bias added  |
| `DeferredRelu` | ReLU in place | apart          | apart    | one pass (1) | bias, ReLU  |
| `DeferredNorm` | norm          | one pass       | one pass | apart        | written (2) |

(1) The pool reads the convolution's outputs; the ReLU's result stays deferred. (2) It is also
written before the norm's input is used, which may change the input. A PReLU leaves it deferred.

docs/adr/0005-fusing-is-local-to-a-rank.md gives the share of a training step that each fusion
saves, measured by benchmarks/python/fusions.py. Fusion is rank-local: the graph and all messages
are the same with and without it.
"""
