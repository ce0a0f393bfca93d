import torch

# The models are tiny: more threads only fight each other.
torch.set_num_threads(1)
