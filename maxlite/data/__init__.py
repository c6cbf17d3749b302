"""Text to tokens to the batch of step N. Knows no model."""

from maxlite.data.batches import Dataset, TrainBatches
from maxlite.data.dataset import open_dataset
from maxlite.data.tokenizer import Tokenizer, load_tokenizer
from maxlite.data.windows import Batch

__all__ = ["Batch", "Dataset", "Tokenizer", "TrainBatches", "load_tokenizer", "open_dataset"]
