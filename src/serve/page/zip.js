// Several files as one zip without compression, for the DICOM files of a series.

const TABLE = new Uint32Array(256).map((_, index) => {
  let value = index;
  for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

function crc32(bytes) {
  let crc = 0xffffffff;
  for (const byte of bytes) crc = TABLE[(crc ^ byte) & 0xff] ^ (crc >>> 8);
  return (crc ^ 0xffffffff) >>> 0;
}

/** Little-endian fields of two (`[2, value]`) or four bytes. */
function fields(...values) {
  const bytes = new DataView(new ArrayBuffer(values.reduce((sum, [size]) => sum + size, 0)));
  let at = 0;
  for (const [size, value] of values) {
    if (size === 2) bytes.setUint16(at, value, true);
    else bytes.setUint32(at, value, true);
    at += size;
  }
  return new Uint8Array(bytes.buffer);
}

/** A zip of `files`. They are numbered: their names may name a patient. */
export async function zipped(files) {
  const parts = [];
  const directory = [];
  let offset = 0;
  for (const [index, file] of files.entries()) {
    const content = new Uint8Array(await file.arrayBuffer());
    const name = new TextEncoder().encode(String(index).padStart(6, "0"));
    // version, flags, method, time, date (1980-01-01), CRC, sizes, length of the name, of extra fields
    const common = [[2, 20], [2, 0], [2, 0], [2, 0], [2, 33], [4, crc32(content)], [4, content.length], [4, content.length], [2, name.length], [2, 0]];
    const head = fields([4, 0x04034b50], ...common);
    // then: length of the comment, disk, attributes, place of the file
    directory.push(fields([4, 0x02014b50], [2, 20], ...common, [2, 0], [2, 0], [2, 0], [4, 0], [4, offset]), name);
    parts.push(head, name, content);
    offset += head.length + name.length + content.length;
  }
  const size = directory.reduce((sum, part) => sum + part.length, 0);
  const end = fields([4, 0x06054b50], [2, 0], [2, 0], [2, files.length], [2, files.length], [4, size], [4, offset], [2, 0]);
  return new Blob([...parts, ...directory, end], { type: "application/zip" });
}

/** The files of a drop, also those inside of folders. */
export async function filesOf(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry && item.webkitGetAsEntry()).filter(Boolean);
  if (!entries.some((entry) => entry.isDirectory)) return [...transfer.files];
  const found = [];
  while (entries.length) {
    const entry = entries.shift();
    if (entry.isFile) found.push(await new Promise((resolve, reject) => entry.file(resolve, reject)));
    if (!entry.isDirectory) continue;
    const reader = entry.createReader();
    // a reader gives at most 100 entries at a time
    for (;;) {
      const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
      if (!some.length) break;
      entries.push(...some);
    }
  }
  return found;
}
