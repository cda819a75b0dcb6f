"""The transports, one module or folder each.

======================  ======================================================================
`local`                 ranks are threads of one process
`mpi`                   processes under MPI, host memory
`c10d`                  processes that torch.distributed connects, host memory
`nccl`                  each rank's CUDA device by NCCL, over one of the above
`ipc`                   halos as copies between devices of one machine, over `nccl`
`cuda_mpi`              device memory by an MPI that takes it
======================  ======================================================================

In a room `transport` has the class that `pydist.runtime` makes. What several have in common stands
beside them: `host` (over a library that moves bytes and adds plain numbers) and `routed` (over
other transports). None knows what exchanges are made of it.
"""
