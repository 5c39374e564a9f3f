// Computes every key of proto/testdata/chunk_keys.json from docs/keys.md alone: node examples/node/check_keys.mjs
import { deepStrictEqual } from "node:assert";
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";

const sha256 = (...parts) => createHash("sha256").update(Buffer.concat(parts)).digest();
const u32 = (n) => { const b = Buffer.alloc(4); b.writeUInt32LE(n); return b; };
const i64 = (n) => { const b = Buffer.alloc(8); b.writeBigInt64LE(BigInt(n)); return b; };
const hex = (text) => Buffer.from(text, "hex");
const sized = (bytes) => Buffer.concat([u32(bytes.length), bytes]);
const names = ["model", "revision", "kv_dtype", "layout_fingerprint", "adapter", "adapter_revision", "salt"];

function encoding(namespace, chunkSize) {
  const raw = names.map((name) => Buffer.from(namespace[name] ?? "", name === "layout_fingerprint" ? "hex" : "utf8"));
  const fields = [...raw, u32(chunkSize), Buffer.from("sha256")];
  return Buffer.concat(fields.flatMap((bytes, i) => (bytes.length ? [u32(i + 1), sized(bytes)] : [])));
}

function extra(inputs, begin, end) {
  const bytes = inputs.filter((i) => i.start < end && i.start + i.length > begin).map((i) => ({ ...i, raw: hex(i.digest) }));
  bytes.sort((a, b) => a.start - b.start || Buffer.compare(a.raw, b.raw) || a.length - b.length);
  return Buffer.concat(bytes.flatMap((i) => [sized(i.raw), i64(i.start - begin), i64(i.length)]));
}

const vectors = JSON.parse(readFileSync(new URL("../../proto/testdata/chunk_keys.json", import.meta.url)));
for (const { name, namespace, chunk_size: size, tokens, inputs, ...expected } of vectors.chains) {
  const canonical = encoding(namespace, size);
  const root = sha256(Buffer.from("kvwire/chunk/v1"), canonical);
  const keys = [], extras = [];
  for (let begin = 0; begin + size <= tokens.length; begin += size) {
    extras.push(extra(inputs, begin, begin + size));
    keys.push(sha256(keys.at(-1) ?? root, ...tokens.slice(begin, begin + size).map(u32), extras.at(-1)));
  }
  const text = (list) => list.map((bytes) => bytes.toString("hex"));
  const [canonical_encoding, rootText] = text([canonical, root]);
  deepStrictEqual({ canonical_encoding, root: rootText, extra: text(extras), keys: text(keys) }, expected, name);
}
for (const { root, blocks_in_chunk: blocks, block_hashes, keys } of vectors.block_hashes) {
  const strided = block_hashes.filter((_, i) => (i + 1) % blocks === 0).map(hex);
  const made = strided.map((h) => sha256(Buffer.from("kvwire/blockhash/v1"), hex(root), sized(h)).toString("hex"));
  deepStrictEqual(made, keys);
}
for (const { salt, digest } of vectors.salt_digests.filter(({ salt }) => salt))
  deepStrictEqual(sha256(Buffer.from("kvwire/salt/v1"), sized(Buffer.from(salt))).toString("hex").slice(0, 16), digest);
console.log(`${vectors.chains.length} chains, ${vectors.block_hashes.length} lists of block hashes: all keys agree`);
