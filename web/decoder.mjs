// A causal language model on ONNX Runtime Web (WASM), batch size 1.
// Rolling back is setting a length: the graph takes as many rows of its past as the attention mask says, and
// overwrites what lies behind them.

export class Decoder {
  #ort;
  #session;
  #past = new Map(); // input name -> tensor
  #outputs;

  /** Rows of past that count. */
  length = 0;
  /** Seconds spent inside the model. */
  seconds = 0;

  constructor(ort, session) {
    [this.#ort, this.#session] = [ort, session];
    for (const { name, shape } of session.inputMetadata) {
      if (!name.startsWith("past_key_values.")) continue;
      this.#past.set(name, new ort.Tensor("float32", new Float32Array(0), [1, shape[1], 0, shape[3]]));
    }
    this.#outputs = session.outputNames.filter((name) => name === "logits" || name.startsWith("present."));
    this.vocabulary = session.outputMetadata.find(({ name }) => name === "logits").shape[2];
  }

  /** `model`: the graph's bytes; `data`: [{path, data}], the files with its weights. */
  static async load(ort, model, data) {
    const options = { executionProviders: ["wasm"], externalData: data, logSeverityLevel: 3 };
    return new Decoder(ort, await ort.InferenceSession.create(model, options));
  }

  /** Feed tokens behind the past, which grows by them. Gives a Float32Array of logits for each. */
  async run(ids) {
    const total = this.length + ids.length;
    const feeds = {
      input_ids: this.#int64(ids.map(BigInt)),
      attention_mask: this.#int64(new Array(total).fill(1n)),
      ...Object.fromEntries(this.#past),
    };
    const began = performance.now();
    const out = await this.#session.run(feeds, this.#outputs);
    this.seconds += (performance.now() - began) / 1000;
    for (const name of this.#past.keys()) this.#past.set(name, out[name.replace("past_key_values", "present")]);
    this.length = total;
    const width = this.vocabulary;
    return ids.map((_, i) => out.logits.data.subarray(i * width, (i + 1) * width));
  }

  /** Forget every row after the first `length`. */
  rollback(length) {
    if (length > this.length) throw new Error(`cannot roll back from ${this.length} rows to ${length}`);
    this.length = length;
  }

  #int64(values) {
    return new this.#ort.Tensor("int64", BigInt64Array.from(values), [1, values.length]);
  }
}

/**
 * Feed a prompt in fixed chunks, none with fewer than `least` rows; gives the logits of its last token.
 * The last chunk takes rows from the one before, and a prompt of one token gets a pad row that is then forgotten.
 */
export async function prefill(decoder, ids, chunk, least) {
  const starts = [];
  for (let at = 0; at < ids.length; at += chunk) starts.push(at);
  if (starts.length > 1 && ids.length - starts.at(-1) < least) starts[starts.length - 1] = ids.length - least;
  let last;
  for (const [i, begin] of starts.entries()) {
    const rows = ids.slice(begin, starts[i + 1]);
    const padding = new Array(Math.max(0, least - rows.length)).fill(rows.at(-1));
    const logits = await decoder.run([...rows, ...padding]);
    decoder.rollback(decoder.length - padding.length);
    last = logits[rows.length - 1];
  }
  return last.slice();
}
