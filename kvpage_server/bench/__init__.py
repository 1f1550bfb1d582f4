"""How fast pages travel on this machine: what `kvpage bench` measures, and the repository's benchmarks with it."""
