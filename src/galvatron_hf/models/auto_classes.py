# Copyright 2026 The galvatron-hf team.
# SPDX-License-Identifier: Apache-2.0
"""Chooses the class of transformers that makes the model of a configuration."""

from __future__ import annotations

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
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
    (MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, AutoModelForImageClassification),
)


def auto_model(config: PreTrainedConfig) -> type:
    """Returns the class of transformers, such as AutoModelForCausalLM, that makes the model of a configuration: with
    the head that it was saved with, and else with that of a language model, or of a classifier of images.
    """
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    for saved in config.architectures or ():
        for mapping, made in _HEADS:
            known = mapping[type(config)] if type(config) in mapping else ()
            if saved in [one.__name__ for one in (known if isinstance(known, tuple) else (known,))]:
                return made
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    of_images = type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    if of_images and not masked and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageClassification
    return AutoModelForMaskedLM if masked else AutoModelForCausalLM
