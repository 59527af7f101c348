// What the page's decoder computes on ONNX Runtime Web, outside a browser: node logits.mjs LIBRARY MODEL [WEIGHTS].
// Prints JSON: the logits behind each of six tokens, fed four and two at a time.

import { readFileSync } from "node:fs";
import { basename, resolve } from "node:path";
import { Decoder } from "../../web/decoder.mjs";

const [library, model, ...weights] = process.argv.slice(2);
const ort = await import(resolve(library));
ort.env.wasm.numThreads = 1;
const data = weights.map((path) => ({ path: basename(path), data: readFileSync(path) }));
const decoder = await Decoder.load(ort, readFileSync(model), data);
const rows = [...(await decoder.run([5, 6, 7, 8])), ...(await decoder.run([9, 10]))];
console.log(JSON.stringify(rows.map((row) => Array.from(row))));
