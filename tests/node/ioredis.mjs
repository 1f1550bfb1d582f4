// What ioredis does with the server on the port of the first argument. Exits with 0 when all of it came out right.
import assert from "node:assert/strict";
import { once } from "node:events";
import { Redis } from "ioredis";

const port = Number(process.argv[2]);
const redis = new Redis({ port, maxRetriesPerRequest: 0, retryStrategy: null });
await once(redis, "ready"); // its ready check has read INFO

// Strings, text and bytes
assert.equal(await redis.set("text", "vår", "EX", 100), "OK");
assert.equal(await redis.get("text"), "vår");
assert.equal(await redis.ttl("text"), 100);
assert.equal(await redis.get("absent"), null);
const bytes = Buffer.from(Array.from({ length: 100000 }, (_, i) => i % 256));
await redis.set("bytes", bytes);
assert.deepEqual(await redis.getBuffer("bytes"), bytes);
assert.equal(await redis.incrby("counter", 5), 5);
assert.deepEqual(await redis.mget("text", "absent"), ["vår", null]);

// Pages
const name = ["node", 0, 0, 0, 0];
assert.equal(await redis.call("KVPAGESET", ...name, 1, 128, 64, 0, bytes), "OK");
assert.deepEqual(await redis.callBuffer("KVPAGEGET", ...name), bytes);
assert.equal(await redis.call("KVPAGEEXISTS", ...name), 1);
const read = await redis.callBuffer("KVPAGEMGET", 2, ...name, "node", 1, 0, 0, 0);
assert.deepEqual(read, [bytes, null]);
assert.equal((await redis.getBuffer("kv:node:0:0:0:0")).length, 64 + bytes.length);

// Errors have the server's words, and the connection goes on
await assert.rejects(redis.call("KVPAGEGET", "node", 70000, 0, 0, 0), /layer_idx must be an integer between 0 and 65535/);
await assert.rejects(redis.call("NOSUCH"), /unknown command/);
assert.equal(await redis.ping(), "PONG");

// Pipelines, transactions, commands that pipeline themselves
const pipeline = redis.pipeline();
for (let i = 0; i < 5000; i++) pipeline.set(`p:${i}`, i);
pipeline.call("NOSUCH");
const results = await pipeline.exec();
assert.equal(results.filter(([error, reply]) => error === null && reply === "OK").length, 5000);
assert.match(results[5000][0].message, /unknown command/);
assert.deepEqual(await redis.multi().incr("n").incr("n").exec(), [[null, 1], [null, 2]]);
const auto = new Redis({ port, enableAutoPipelining: true });
const echoed = await Promise.all(Array.from({ length: 1000 }, (_, i) => auto.get(`p:${i}`)));
assert.deepEqual(echoed, Array.from({ length: 1000 }, (_, i) => String(i)));
auto.disconnect();

// Scans
const found = new Set();
for await (const keys of redis.scanStream({ match: "p:*", count: 500 })) keys.forEach((key) => found.add(key));
assert.equal(found.size, 5000);

// Messages
const listener = new Redis({ port });
await listener.subscribe("news");
const message = once(listener, "message");
assert.equal(await redis.publish("news", "hello"), 1);
assert.deepEqual(await message, ["news", "hello"]);
await listener.quit();

// Monitoring
const watcher = new Redis({ port, disableClientInfo: true }); // its CLIENT SETINFO may come before it knows that it monitors
await watcher.ping(); // it is ready: its own INFO is not among the monitored commands
const monitor = await watcher.monitor(); // a connection of its own
const seen = once(monitor, "monitor");
await redis.get("watched");
assert.deepEqual((await seen)[1], ["get", "watched"]);
monitor.disconnect();
watcher.disconnect();

assert.equal(await redis.quit(), "OK");
