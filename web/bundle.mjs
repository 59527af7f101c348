// The bundle beside the page: what its manifest says, and files that are as they were exported.

/** A bundle at a relative address. Every failure is one line that names the file and the fix. */
export class Bundle {
  #base;

  constructor(base, manifest, page) {
    [this.#base, this.manifest, this.page] = [base, manifest, page];
  }

  /** Read manifest.json and page.json, what pack prepared for the page. */
  static async open(base) {
    const [manifest, page] = await Promise.all(
      ["manifest.json", "page.json"].map(async (name) => JSON.parse(new TextDecoder().decode(await get(base + name)))),
    );
    return new Bundle(base, manifest, page);
  }

  /** The bytes of a file of the manifest, checked against its size and, where the browser can, its SHA-256. */
  async bytes(name) {
    const { size, sha256 } = this.manifest.files[name];
    const data = await get(this.#base + name);
    if (data.length !== size) throw new Error(`${name}: ${data.length} bytes, the manifest says ${size}; unpack again`);
    if (crypto.subtle && (await digest(data)) !== sha256) {
      throw new Error(`${name}: changed since export (SHA-256 differs); unpack again`);
    }
    return data;
  }

  async json(name) {
    return JSON.parse(new TextDecoder().decode(await this.bytes(name)));
  }

  /** A graph and the files with its weights, as ONNX Runtime Web takes them. */
  async graph(model) {
    const names = Object.keys(this.manifest.files).filter((name) => name.startsWith(`${model}.`));
    const data = await Promise.all(
      names.map(async (name) => ({ path: name.split("/").at(-1), data: await this.bytes(name) })),
    );
    return [await this.bytes(model), data];
  }
}

/** Hashes are only to be had on https and on this very machine; elsewhere sizes are all that is checked. */
export const checksHashes = () => crypto.subtle !== undefined;

async function get(url) {
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url}: missing (status ${response.status}); unpack the package again`);
  return new Uint8Array(await response.arrayBuffer());
}

async function digest(data) {
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", data));
  return Array.from(hash, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
