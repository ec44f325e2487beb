# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Chooses the class of transformers that makes the model of a configuration."""

from __future__ import annotations

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)


_HEADS = (
    (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
    (MODEL_FOR_MASKED_LM_MAPPING, AutoModelForMaskedLM),
    (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification),
    (MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoModelForTokenClassification),
    (MODEL_FOR_QUESTION_ANSWERING_MAPPING, AutoModelForQuestionAnswering),
)


def auto_model(config: PreTrainedConfig) -> type:
    """Returns the class of transformers, such as AutoModelForCausalLM, that makes the model of a configuration: with
    the head that it was saved with, and else with that of a language model.
    """
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    for saved in config.architectures or ():
        for mapping, made in _HEADS:
            if type(config) in mapping and mapping[type(config)].__name__ == saved:
                return made
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    return AutoModelForMaskedLM if masked else AutoModelForCausalLM
