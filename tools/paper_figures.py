"""The figures of OmniDraft (arXiv 2507.02659), as it prints them: for other models, on an A100, in fp16, at T = 0.01.

A cell is acceptance rate / speed-up where nothing else is said; an empty one is not in the paper.
"""

from __future__ import annotations

TASKS = ("GSM8K", "MBPP+HumanEval", "Alpaca", "XSum")
PAPER = {
    "Llama-68M for Llama3-8B": {
        "SpD_DM": (".10/0.94", ".09/1.03", ".09/0.96", ".11/0.91"),
        "+ L_DM": (".32/1.58", ".22/1.26", ".16/1.25", ".20/1.20"),
        "+ L_DM + λ L_N": (".42/1.70", ".27/1.33", ".20/1.30", ".24/1.24"),
        "the same, LoRA": (".37/1.59", ".19/1.28", ".17/1.21", ".23/1.21"),
    },
    "Llama-68M for Qwen2-7B": {
        "SpD_DM": (".14/1.04", ".09/0.91", ".13/1.01", ".12/0.96"),
        "+ L_DM": (".33/1.50", ".22/1.29", ".17/1.25", ".19/1.16"),
        "+ L_DM + λ L_N": (".37/1.61", ".26/1.36", ".20/1.30", ".22/1.22"),
        "the same, LoRA": (".31/1.41", ".21/1.21", ".18/1.25", ".22/1.21"),
    },
    "Llama-68M for Vicuna-7B, one vocabulary": {
        "SpD": (".21/1.44", ".14/1.22", ".20/1.44", ".20/1.42"),
        "LoRA, distillation": (".37/1.95", ".24/1.52", ".25/1.54", ".23/1.49"),
        "LoRA, adaptive, joint": (".49/1.87", ".39/1.59", ".39/1.58", ".41/1.54"),
        "LoRA, adaptive, interleaved": (".49/1.94", ".38/1.61", ".42/1.58", ".39/1.55"),
    },
    "Llama3-8B, 4K of GSM8K, k = 4": {
        "SpD_DM": (".12/1.01", "", "", ""),
        "+ n-gram cache": (".16/1.11", "", "", ""),
        "L_DM without the cache": (".32/1.51", "", "", ""),
        "+ L_DM": (".35/1.54", "", "", ""),
        "+ L_DM + λ L_N": (".41/1.61", "", "", ""),
    },
    "LoRA rank 8, 16, 32, 64, 128 (Llama3-8B)": {
        "accept": (".30 .34 .37 .38 .38", "", "", ""),
        "speed-up": ("1.48 1.54 1.60 1.63 1.63", "", "", ""),
    },
    "Cache of Qwen2-7B": {
        "n-grams": ("5 569", "2 238", "20 339", "17 013"),
        "MB as Python objects": ("1.372", "0.501", "4.569", "3.924"),
    },
    "Eviction (Qwen2-7B)": {
        "no cache": ("", ".219/1.29", "", ""),
        "1/4, LRU": ("", ".254/1.33", "", ""),
        "1/4, LFU": ("", ".259/1.36", "", ""),
        "1/2, LRU": ("", ".261/1.35", "", ""),
        "1/2, LFU": ("", ".263/1.36", "", ""),
        "whole": ("", ".267/1.36", "", ""),
    },
}
