"""What `mla-serve bench` runs: attention kernels beside each other, the whole server beside a peer, the look-up."""
