"""The commands of Redis 7 that do not exist here, and their ACL categories.

Rules for users may name them, so that an aclfile written for Redis can be used. They are kept in the rules and have no
effect. docs/compatibility.md lists them for people.
"""

from __future__ import annotations

import re

_BY_CATEGORIES = """
admin dangerous hyperloglog slow: pfselftest
admin dangerous hyperloglog slow write: pfdebug
admin dangerous slow: bgrewriteaof cluster|addslots cluster|addslotsrange cluster|bumpepoch
    cluster|count-failure-reports cluster|delslots cluster|delslotsrange cluster|failover cluster|flushslots
    cluster|forget cluster|meet cluster|replicas cluster|replicate cluster|reset cluster|saveconfig
    cluster|set-config-epoch cluster|setslot cluster|slaves debug failover latency|graph module|load module|loadex
    module|unload psync replconf replicaof slaveof sync
bitmap fast read: bitfield_ro getbit
bitmap read slow: bitcount bitpos
bitmap slow write: bitfield bitop setbit
blocking connection slow: waitaof
blocking fast sortedset write: bzpopmax bzpopmin
blocking list slow write: blmove blmpop blpop brpop brpoplpush
blocking read slow stream: xread
blocking slow sortedset write: bzmpop
blocking slow stream write: xreadgroup
connection fast: asking
dangerous fast keyspace write: swapdb
dangerous keyspace slow write: migrate restore restore-asking
dangerous list read set slow sortedset: sort_ro
dangerous list set slow sortedset write: sort
fast hash read: hexists hexpiretime hget hlen hmget hpexpiretime hpttl hstrlen httl
fast hash write: hdel hexpire hexpireat hincrby hincrbyfloat hmset hpersist hpexpire hpexpireat hset hsetnx
fast hyperloglog write: pfadd
fast keyspace write: move renamenx
fast list read: llen
fast list write: lpop lpush lpushx rpop rpush rpushx
fast pubsub: spublish
fast read: lolwut
fast read set: smismember
fast read sortedset: zcard zcount zlexcount zmscore zrank zrevrank zscore
fast read stream: xlen
fast set write: sadd smove spop srem
fast sortedset write: zadd zincrby zpopmax zpopmin zrem
fast stream write: xack xadd xautoclaim xclaim xdel xsetid
fast string write: append incrbyfloat
geo read slow: geodist geohash geopos georadius_ro georadiusbymember_ro geosearch
geo slow write: geoadd georadius georadiusbymember geosearchstore
hash read slow: hgetall hkeys hrandfield hscan hvals
hyperloglog read slow: pfcount
hyperloglog slow write: pfmerge
keyspace read slow: dump
keyspace slow write: copy rename
list read slow: lindex lpos lrange
list slow write: linsert lmove lmpop lrem lset ltrim rpoplpush
pubsub slow: pubsub|shardchannels pubsub|shardnumsub ssubscribe sunsubscribe
read set slow: sdiff sinter sintercard srandmember sunion
read slow sortedset: zdiff zinter zintercard zrandmember zrange zrangebylex zrangebyscore zrevrange zrevrangebylex
    zrevrangebyscore zscan zunion
read slow stream: xinfo|consumers xinfo|groups xinfo|stream xpending xrange xrevrange
read slow string: lcs
scripting slow: eval eval_ro evalsha evalsha_ro fcall fcall_ro function|dump function|help function|kill
    function|list function|stats script|debug script|exists script|flush script|help script|kill script|load
scripting slow write: function|delete function|flush function|load function|restore
set slow write: sdiffstore sinterstore sunionstore
slow: cluster|countkeysinslot cluster|getkeysinslot cluster|links cluster|myshardid function memory|malloc-stats
    memory|purge script xgroup xinfo
slow sortedset write: zdiffstore zinterstore zmpop zrangestore zremrangebylex zremrangebyrank zremrangebyscore
    zunionstore
slow stream: xgroup|help xinfo|help
slow stream write: xgroup|create xgroup|createconsumer xgroup|delconsumer xgroup|destroy xgroup|setid xtrim
slow string write: setrange
"""


def _read(table: str) -> dict[str, frozenset[str]]:
    rows = (row.split(":") for row in re.sub(r"\n +", " ", table).strip().splitlines())
    return {name: frozenset(categories.split()) for categories, names in rows for name in names.split()}


ABSENT = _read(_BY_CATEGORIES)  # categories by name; a subcommand is named `container|sub`
