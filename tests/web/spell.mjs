// Ids of byte strings by the page's view of a tokenizer: node spell.mjs FOLDER/tokenizers.min.mjs < cases.
// Reads [[tokenizer.json's path, [hex, …]], …]; prints a list of ids (null where there are none) for each text.

import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
import { TokenBytes } from "../../web/token_bytes.mjs";

const { Tokenizer } = await import(pathToFileURL(process.argv[2]));

const cases = JSON.parse(readFileSync(0, "utf-8"));
const spelled = cases.map(([path, texts]) => {
  const tokens = new TokenBytes(Tokenizer, JSON.parse(readFileSync(path, "utf-8")));
  return texts.map((hex) => tokens.encode(Uint8Array.from(Buffer.from(hex, "hex"))));
});
console.log(JSON.stringify(spelled));
