// A target and its drafter, loaded and ready.

import { Decoder } from "./decoder.mjs";
import { leastRows } from "./invariance.mjs";
import { TokenBytes } from "./token_bytes.mjs";
import { Translation } from "./translation.mjs";

/**
 * Load the pair of a bundle. `ort`: ONNX Runtime Web; `Tokenizer`: of @huggingface/tokenizers; `tell`: says what goes on.
 * Gives target and drafter {info, tokens, decoder}, `translation`, `frames` (see prompt.mjs), `leastRows` and `exact`,
 * whether text with drafting is that without it, bit for bit.
 */
export async function loadPair(ort, Tokenizer, bundle, tell) {
  const { manifest, page } = bundle;
  const info = manifest.targets[page.target];
  tell("loading the drafter …");
  const drafter = await load(ort, Tokenizer, bundle, manifest.drafter, manifest.drafter.model);
  tell(`loading the target ${page.target} …`);
  const target = await load(ort, Tokenizer, bundle, info, info.graphs[0].model);
  const translation = new Translation(await mapOf(bundle, info), drafter.decoder.vocabulary);
  tell("measuring how many rows give equal logits here …");
  const w0 = await leastRows(target.decoder);
  return { target, drafter, translation, frames: page.prompts, leastRows: w0 ?? 1, exact: w0 !== null };
}

async function load(ort, Tokenizer, bundle, info, model) {
  const decoder = await Decoder.load(ort, ...(await bundle.graph(model)));
  const tokens = new TokenBytes(Tokenizer, await bundle.json(info.tokenizer), decoder.vocabulary);
  return { info, tokens, decoder };
}

async function mapOf(bundle, info) {
  const map = await bundle.json(info.map);
  const made = [map.draft_sha256, map.target_sha256];
  if (made.join() !== [bundle.manifest.drafter.tokenizer_sha256, info.tokenizer_sha256].join()) {
    throw new Error(`${info.map}: made for other tokenizers; export the bundle again`);
  }
  return map;
}
