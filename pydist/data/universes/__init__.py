"""Makes synthetic universes: Gaussian fields that evolve by Lagrangian perturbation theory.

They replace the public CosmoFlow data where that is not available: same files, same kind of task
(predict a universe's parameters from its matter), right statistics on large scales; below about
10 Mpc/h they cluster too little at z = 0.
"""
