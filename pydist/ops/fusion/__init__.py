"""Two calls in one pass over memory: the result of the first one is deferred until it is used.

Each entry is what happens to a deferred result (`pydist.tensor.deferred`) when something is done
with it. "Apart" is torch's own call on the completed result.

| deferred       | made by       | ReLU in place  | PReLU    | average pool | other use   |
|----------------|---------------|----------------|----------|--------------|-------------|
| `NOTHING`      | calls         | apart          | apart    | apart        | as it is    |
| `ConvOutputs`  | convolution   | `DeferredRelu` | apart    | apart        | bias added  |
| `DeferredRelu` | ReLU in place | apart          | apart    | one pass (1) | bias, ReLU  |
| `DeferredNorm` | norm          | one pass       | one pass | apart        | written (2) |

(1) The pool reads the convolution's outputs; the ReLU's result stays deferred. (2) As it is before
the norm's input is used, which may change it. After a PReLU it stays deferred as well.

What each fusion saves of a training step is in docs/adr/0005-fusing-is-local-to-a-rank.md, measured
by benchmarks/python/fusions.py. Which ranks fuse is their own affair: the graph and all messages
are the same in both ways.
"""
