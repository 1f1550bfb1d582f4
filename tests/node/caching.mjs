// What node-redis does with its client-side cache and the server on the port of the first argument. Exits with 0 when
// all of it came out right.
import assert from "node:assert/strict";
import { BasicClientSideCache, createClient } from "@redis/client";

const url = `redis://127.0.0.1:${Number(process.argv[2])}`;
const cache = new BasicClientSideCache({ ttl: 0, maxEntries: 0, evictPolicy: "LRU" });
const keeps = createClient({ url, RESP: 3, clientSideCache: cache, socket: { reconnectStrategy: false } });
const writes = createClient({ url, socket: { reconnectStrategy: false } });
await keeps.connect(); // it reads INFO, and has the server track
await writes.connect();

// The second read does not leave the client; the one after a change does.
await writes.set("kept", "1");
assert.equal(await keeps.get("kept"), "1");
assert.equal(await keeps.get("kept"), "1");
assert.equal(cache.stats().hitCount, 1);
assert.equal(cache.stats().missCount, 1);
await writes.set("kept", "2");
await becomes("2");

// A page is told of as the key that it is.
const name = ["kept", "0", "0", "0", "0"];
const page = ["KVPAGESET", ...name, "1", "1", "2", "0"];
await writes.sendCommand([...page, "abcd"]);
const blob = await keeps.get("kv:kept:0:0:0:0");
await writes.sendCommand([...page, "efgh"]);
await until(async () => (await keeps.get("kv:kept:0:0:0:0")) !== blob);

await writes.flushAll();
await becomes(null);

keeps.destroy();
writes.destroy();

async function becomes(value) {
  await until(async () => (await keeps.get("kept")) === value);
}

async function until(holds) {
  const deadline = Date.now() + 5000;
  while (!(await holds())) {
    assert.ok(Date.now() < deadline, "it was not told");
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
}
