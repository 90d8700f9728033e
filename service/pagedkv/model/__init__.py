"""Models: configuration, weights, tokenizer and the decoder, from GGUF files and Hugging Face directories."""

from pagedkv.model.config import ModelConfig
from pagedkv.model.decoder import Decoder, StepInput
from pagedkv.model.load import LoadedModel, load_model, read_model_config
from pagedkv.model.tokenizer import Tokenizer

__all__ = ["Decoder", "LoadedModel", "ModelConfig", "StepInput", "Tokenizer", "load_model", "read_model_config"]
