"""What holds for all tests."""

import torch

torch.set_num_threads(1)
"""Small models only wait for a second one, and for very long when the cores are busy."""
