"""Text to calibrate a quantized graph on: what the model itself says, so that no file of text is needed."""

from __future__ import annotations

from omnidraft.export.sources import Source
from omnidraft.runtime.causal_model import CausalModel
from omnidraft.runtime.chat import ChatTemplate, encode_prompt, utf8
from omnidraft.runtime.sampling import Sampling, draw
from omnidraft.runtime.token_bytes import TokenBytes

# Of different kinds, since every kind of text may reach values that no other does.
QUESTIONS = (
    "Why is the sky blue? Explain it to a child.",
    "Write a Python function that checks whether a word is a palindrome, with a docstring.",
    "Anna has 12 apples, gives 5 to Ben and buys 3 bags of 4. How many has she now? Think step by step.",
    "Translate into German, French and Spanish: The train leaves at half past seven.",
    "List five animals of the savanna as JSON, with their weights in kilograms.",
    "Write the beginning of a story about a lighthouse keeper and a storm.",
    "Summarise: On 3 May 2021, shares of Kessler & Sons (KSL) fell 4.7% to $18.20 after weak sales in Asia.",
    "¿Cuál es la capital de Perú, y cuántos habitantes tiene?",
)
ANSWER = 96  # tokens at most


def own_text(source: Source, decoder: CausalModel, context: int) -> list[list[int]]:
    """Token ids of QUESTIONS with answers that `decoder`, a graph of the source with so many positions, draws at
    temperature 1: the same ones each time."""
    tokens = TokenBytes.from_file(source.tokenizer)
    tokens.fit(source.vocabulary)
    texts = [_prompt(source, tokens, question)[: context - 1] for question in QUESTIONS]
    return [_answered(source, decoder, text, context, seed) for seed, text in enumerate(texts)]


def _prompt(source: Source, tokens: TokenBytes, question: str) -> list[int]:
    if source.chat_template is None:
        return ([] if source.bos is None else [source.bos]) + tokens.encode_prompt([utf8(question)])
    template = ChatTemplate(source.chat_template, source.template_tokens)
    return tokens.encode_prompt(encode_prompt(template, [{"role": "user", "content": question}], tokens.special))


def _answered(source: Source, decoder: CausalModel, prompt: list[int], context: int, seed: int) -> list[int]:
    sampling, ids = Sampling(1.0, seed=seed), list(prompt)
    decoder.rollback(0)
    logits = decoder.run(prompt)[-1]
    for _ in range(min(ANSWER, context - len(prompt))):
        ids.append(draw(logits, ids, sampling, len(ids)))
        if ids[-1] in source.stop_ids or len(ids) == context:
            break
        logits = decoder.run(ids[-1:])[-1]
    return ids
