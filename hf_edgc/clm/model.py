"""The configuration, tokenizer and weights of a run, from the Hub, a folder or scratch."""

from pathlib import Path
from typing import Any, cast

import datasets
import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_edgc.clm.arguments import ModelArguments
from hf_edgc.clm.errors import UsageError
from hf_edgc.clm.hub import loading
from hf_edgc.clm.text import Text
from hf_edgc.corpus import train_byte_level_bpe

LARGEST_DEFAULT_BLOCK = 1024
"""As in run_clm: a model with very many positions gets blocks that fit into memory."""


def load_config(arguments: ModelArguments) -> PretrainedConfig:
    """Load the configuration of the model, or make that of a new one.

    Raises:
        UsageError: a name that cannot be loaded, an unknown architecture, or overrides that do not fit it.
    """
    option = "config_name" if arguments.config_name else "model_name_or_path"
    if name := getattr(arguments, option):
        with loading(option, name):
            return cast(PretrainedConfig, AutoConfig.from_pretrained(name, **_hub_options(arguments)))
    kind = arguments.model_type
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(
            f"model_type={kind!r} is not allowed: use gpt2, or another architecture that transformers' "
            "AutoModelForCausalLM knows, such as gpt_neo, opt or llama."
        )
    config = CONFIG_MAPPING[kind]()
    if arguments.config_overrides:
        try:
            config.update_from_string(arguments.config_overrides)
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"config_overrides={arguments.config_overrides!r} does not fit {kind}: {error}. Write "
                "name=value,name=value with names of its configuration, as in n_embd=128,n_layer=4."
            ) from error
    return config


def load_tokenizer(arguments: ModelArguments, text: Text) -> PreTrainedTokenizerBase:
    """Load the tokenizer that is named, or that of the model, or train one on the text of a new model.

    Raises:
        UsageError: a name that cannot be loaded, or no text to train a tokenizer on.
    """
    option = "tokenizer_name" if arguments.tokenizer_name else "model_name_or_path"
    if name := getattr(arguments, option):
        with loading(option, name):
            return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(name, **_hub_options(arguments)))
    if not isinstance(text.train, datasets.Dataset):
        reason = "there is no training text" if text.train is None else "streaming reads the text only once"
        raise UsageError(f"A tokenizer cannot be trained on the text, because {reason}: pass tokenizer_name.")
    folder = Path(arguments.cache_dir or datasets.config.HF_DATASETS_CACHE) / "hf_edgc"
    rows = [row or "" for row in text.train[text.column]]
    return train_byte_level_bpe(rows, arguments.tokenizer_vocab_size, folder)


def choose_block_size(config: PretrainedConfig, asked: int | None) -> int:
    """Tokens in a block: as asked for, or the positions of the model, at most 1024.

    Raises:
        UsageError: more is asked for than the model has positions.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if asked is None:
        return min(LARGEST_DEFAULT_BLOCK, positions or LARGEST_DEFAULT_BLOCK)
    if positions is not None and asked > positions:
        raise UsageError(
            f"block_size={asked} is not allowed: the model has {positions} positions. Use --block_size {positions} or "
            "less, or a new model with more (for GPT-2 --config_overrides n_positions=...)."
        )
    return asked


def load_model(
    arguments: ModelArguments, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Load the weights of the model that is named, or make a new model with the tokenizer's vocabulary.

    A model that is loaded with fewer embeddings than the tokenizer has entries gets more; ``config`` is changed to
    the vocabulary of the tokenizer for a new model. The weights of a new model come from torch's global generator.

    Raises:
        UsageError: a name that cannot be loaded, or a configuration that fits neither itself nor the tokenizer.
    """
    if arguments.model_name_or_path is None:
        model = _new_model(arguments, config, tokenizer)
    else:
        model = _trained_model(arguments, arguments.model_name_or_path, config, tokenizer)
    if model.loss_type is None:
        # GPT2LMHeadModel does not say which loss it has: transformers 5.24 then warns at every start, and Trainer
        # divides the loss of a block by its L tokens although L - 1 are predicted.
        model.loss_type = "ForCausalLM"
    return model


def _trained_model(
    arguments: ModelArguments, name: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    dtype = {} if arguments.dtype is None else {"dtype": arguments.dtype}
    with loading("model_name_or_path", name):
        model = AutoModelForCausalLM.from_pretrained(name, config=config, **dtype, **_hub_options(arguments))
    if len(tokenizer) > cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    return cast(PreTrainedModel, model)


def _new_model(
    arguments: ModelArguments, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    chosen = "vocab_size=" in (arguments.config_overrides or "")
    if chosen and config.vocab_size < len(tokenizer):
        raise UsageError(
            f"config_overrides vocab_size={config.vocab_size} is not allowed: the tokenizer has {len(tokenizer)} "
            "entries. Use as many or more, or leave it out."
        )
    if not chosen:
        config.vocab_size = len(tokenizer)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    dtype: Any = torch.float32 if arguments.dtype is None else arguments.dtype
    if arguments.dtype == "auto":
        dtype = config.dtype or torch.float32
    try:
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=arguments.trust_remote_code
        )
    except ValueError as error:
        raise UsageError(
            f"No {config.model_type} can be built with config_overrides={arguments.config_overrides!r}: {error}"
        ) from error
    return cast(PreTrainedModel, model)


def _hub_options(arguments: ModelArguments) -> dict[str, Any]:
    return {
        "cache_dir": arguments.cache_dir,
        "revision": arguments.model_revision,
        "token": arguments.token,
        "trust_remote_code": arguments.trust_remote_code,
    }
