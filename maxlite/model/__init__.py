"""The network: a Llama, its attention kernels, its loss and its size. Knows no files and no meshes."""
