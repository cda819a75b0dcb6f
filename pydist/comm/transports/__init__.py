"""Implements the transports, in one module or folder each.

======================  ======================================================================
`local`                 ranks are threads of one process
`mpi`                   processes under MPI, host memory
`c10d`                  processes that torch.distributed connects, host memory
`nccl`                  each rank's CUDA device by NCCL, over one of the above
`ipc`                   halos as copies between devices of one machine, over `nccl`
`cuda_mpi`              device memory by a CUDA-aware MPI
`staged`                ranks with and without a device, through host memory
======================  ======================================================================

In a folder, `transport` defines the class that `pydist.runtime` instantiates. Shared base classes
are in `host` (over a library that transfers bytes and reduces plain numbers) and `routed` (over
other transports). No transport knows about the exchanges that are built on it.
"""
