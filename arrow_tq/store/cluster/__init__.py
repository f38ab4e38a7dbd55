"""Many shards behind one catalog: the map, what commits need of far shards, and a shard's own side."""
