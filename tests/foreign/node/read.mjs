// Reads fields of a run from every shard: node read.mjs URL RUN FIELD[:GROUP]...
// Prints JSON: by field the endpoints followed, the rows, and by segment a SHA-256 over all of its rows in
// the order of their positions (each row: the position as 8 bytes, little endian, then the value's bytes).
import { createHash } from "node:crypto";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import { tableFromIPC } from "apache-arrow";

const DEADLINE_MS = 60_000;
const ANY_SIZE = { "grpc.max_receive_message_length": -1 };
const proto = fileURLToPath(new URL("flight.proto", import.meta.url));
const definition = loader.loadSync(proto, { keepCase: true, longs: Number, enums: String, defaults: true });
const { FlightService } = grpc.loadPackageDefinition(definition).arrow.flight.protocol;

const clients = new Map();

function clientOf(uri) {
  const address = uri.replace(/^grpc(\+tcp)?:\/\//, "");
  if (!clients.has(address)) {
    clients.set(address, new FlightService(address, grpc.credentials.createInsecure(), ANY_SIZE));
  }
  return clients.get(address);
}

const deadline = () => ({ deadline: Date.now() + DEADLINE_MS });

function flightInfo(client, path) {
  return new Promise((resolve, reject) => {
    const descriptor = { type: "PATH", path };
    client.GetFlightInfo(descriptor, deadline(), (error, info) => (error ? reject(error) : resolve(info)));
  });
}

async function flights(client, run) {
  const found = [];
  const criteria = { expression: Buffer.from(JSON.stringify({ run })) };
  for await (const info of client.ListFlights(criteria, deadline())) {
    found.push(info);
  }
  return found;
}

// An IPC stream of the messages: continuation mark, length of the padded header, header, body.
function encapsulated({ data_header: header, data_body: body }) {
  const size = Math.ceil(header.length / 8) * 8;
  const framed = Buffer.alloc(8 + size);
  framed.writeUInt32LE(0xffffffff, 0);
  framed.writeInt32LE(size, 4);
  header.copy(framed, 8);
  return [framed, body, Buffer.alloc((8 - (body.length % 8)) % 8)];
}

async function tableOf(endpoint) {
  const client = clientOf(endpoint.location[0].uri);
  const parts = [];
  for await (const message of client.DoGet(endpoint.ticket, deadline())) {
    if (message.data_header.length) {
      parts.push(...encapsulated(message));
    }
  }
  return tableFromIPC(Buffer.concat(parts));
}

// The bytes of each row of a column chunk, whatever fixed-width type it has.
function rowBytes(data) {
  let items = data;
  let width = 1;
  while (items.children.length) {
    width *= items.type.listSize;
    items = items.children[0];
  }
  const { values } = items;
  const size = width * values.BYTES_PER_ELEMENT;
  return (row) => new Uint8Array(values.buffer, values.byteOffset + row * size, size);
}

function collect(table, field, rows) {
  for (const batch of table.batches) {
    const segments = batch.getChild("segment_id");
    const positions = batch.getChild("position");
    const bytes = rowBytes(batch.getChild(field).data[0]);
    for (let row = 0; row < batch.numRows; row += 1) {
      const segment = segments.get(row);
      if (!rows.has(segment)) {
        rows.set(segment, []);
      }
      rows.get(segment).push([positions.get(row), bytes(row)]);
    }
  }
}

function digest(rows) {
  const hash = createHash("sha256");
  const place = Buffer.alloc(8);
  for (const [position, bytes] of rows.sort(([one], [other]) => (one < other ? -1 : 1))) {
    place.writeBigInt64LE(position);
    hash.update(place).update(bytes);
  }
  return hash.digest("hex");
}

async function read(client, path) {
  const info = await flightInfo(client, path);
  const field = path[1].split(":")[0];
  // The schema is a message of its own: a stream of no batches.
  const schema = tableFromIPC(info.schema).schema;
  const rows = new Map();
  const endpoints = [];
  let count = 0;
  for (const endpoint of info.endpoint) {
    const table = await tableOf(endpoint);
    if (String(table.schema) !== String(schema)) {
      throw new Error(`${endpoint.location[0].uri}: ${table.schema} is not ${schema}`);
    }
    endpoints.push({ uri: endpoint.location[0].uri, rows: table.numRows });
    count += table.numRows;
    collect(table, field, rows);
  }
  if (count !== info.total_records) {
    throw new Error(`${path}: ${count} rows, the info says ${info.total_records}`);
  }
  const segments = Object.fromEntries([...rows].map(([name, some]) => [name, digest(some)]));
  return { schema: String(schema), endpoints, rows: count, segments };
}

const [url, run, ...labels] = process.argv.slice(2);
const main = clientOf(url);
const listed = (await flights(main, run)).map((info) => info.flight_descriptor.path);
const fields = {};
for (const label of labels) {
  fields[label] = await read(main, [run, label]);
}
// And as they are listed: one flight a segment.
const alone = {};
for (const path of listed.filter((one) => labels.includes(one[1]))) {
  const found = await read(main, path);
  alone[`${path[1]} ${path[2]}`] = found.segments[path[2]];
}
for (const client of clients.values()) {
  client.close();
}
console.log(JSON.stringify({ listed, fields, alone }));
