//! Reader for the pickles in PyTorch files. It never executes anything (like `weights_only=True`).
//!
//! It supports dictionaries, lists, tuples, numbers, strings, `OrderedDict`, and the functions that rebuild tensors and
//! parameters from storages. Any other name in a pickle is an error.
//! Sources: Python's `pickletools` for the opcodes; `torch/_utils.py` and `torch/_weights_only_unpickler.py` for
//! tensors.

use std::collections::HashMap;
use std::rc::Rc;

use super::safetensors::DTYPES;
use tch::Kind;

/// Reason why a pickle cannot be read. The text follows the name of the file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PickleError {
    /// It names a function or class that is not allowed.
    Executes(String),
    /// It is damaged, or uses something that no state dict needs.
    Malformed(String),
}

type Result<T> = std::result::Result<T, PickleError>;

/// Most dimensions of a tensor, as in PyTorch.
const MAX_DIMENSIONS: usize = 64;
/// Bytes of a value on the stack or in a container.
const VALUE: usize = size_of::<Value>();
/// Bytes of an entry of the memo.
const MEMO: usize = 64;

/// Memory that the contents of a file may take: 32 times the size of the file, and 1 MiB. Vectors may have twice the
/// capacity that they need, so the limit on real memory is 64 times the size.
///
/// A pickle can refer to one value many times. Without a limit, copies of a shared value need memory that grows with
/// the square of the file's size.
#[derive(Debug)]
pub(super) struct ParseBudget {
    left: usize,
}

impl ParseBudget {
    /// The budget of a file of `file_bytes`.
    pub(super) fn new(file_bytes: usize) -> Self {
        Self { left: file_bytes.saturating_mul(32).saturating_add(1 << 20) }
    }

    /// Takes `bytes`. Nothing is given back.
    pub(super) fn take(&mut self, bytes: usize) -> Result<()> {
        let left = self.left.checked_sub(bytes);
        self.left =
            left.map_or_else(|| malformed("its contents need more than 64 times the memory of the file"), Ok)?;
        Ok(())
    }
}

fn malformed<T>(reason: impl Into<String>) -> Result<T> {
    Err(PickleError::Malformed(reason.into()))
}

/// Contiguous elements in `data/KEY` of the archive.
#[derive(Debug, Clone)]
pub(super) struct Storage {
    pub(super) kind: Kind,
    pub(super) key: Rc<str>,
    pub(super) num_elements: i64,
}

/// A view into a storage, in elements.
#[derive(Debug, Clone)]
pub(super) struct TensorRef {
    pub(super) storage: Rc<Storage>,
    pub(super) offset: i64,
    pub(super) shape: Vec<i64>,
    pub(super) strides: Vec<i64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Function {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Storage(Kind),
}

/// A value. Containers are indices into the [`Pickle`], so that a deep or cyclic file can do no harm.
#[derive(Debug, Clone)]
pub(super) enum Value {
    None,
    Int(i64),
    /// Booleans, floats and bytes, whose values are not needed.
    Other,
    Str(Rc<str>),
    Tuple(usize),
    List(usize),
    Dict(usize),
    Storage(Rc<Storage>),
    Tensor(Rc<TensorRef>),
    Function(Function),
}

impl Value {
    /// The text of a string.
    pub(super) fn text(&self) -> Option<&str> {
        if let Self::Str(text) = self { Some(text) } else { None }
    }
}

/// A parsed pickle: its containers, its storages and the top value.
#[derive(Debug)]
pub(super) struct Pickle {
    dicts: Vec<Vec<(Value, Value)>>,
    sequences: Vec<Vec<Value>>,
    pub(super) storages: Vec<Rc<Storage>>,
    pub(super) top: Value,
}

impl Pickle {
    /// Parses a whole pickle.
    pub(super) fn read(bytes: &[u8], budget: &mut ParseBudget) -> Result<Self> {
        Self::read_first(bytes, budget).map(|(pickle, _)| pickle)
    }

    /// Parses the pickle at the start of `bytes`. Also returns its length in bytes.
    pub(super) fn read_first(bytes: &[u8], budget: &mut ParseBudget) -> Result<(Self, usize)> {
        let mut unpickler = Unpickler::new(bytes, budget);
        let top = unpickler.run()?;
        let Unpickler { at, dicts, sequences, storages, .. } = unpickler;
        Ok((Self { dicts, sequences, storages, top }, at))
    }

    /// The strings of a list of strings.
    pub(super) fn strings(&self, value: &Value) -> Option<Vec<&str>> {
        let Value::List(index) = value else { return None };
        self.sequences[*index].iter().map(Value::text).collect()
    }

    /// The pairs of a dictionary.
    pub(super) fn dict(&self, value: &Value) -> Option<&[(Value, Value)]> {
        if let Value::Dict(index) = value { Some(&self.dicts[*index]) } else { None }
    }
}

struct Unpickler<'a, 'b> {
    bytes: &'a [u8],
    budget: &'b mut ParseBudget,
    at: usize,
    stack: Vec<Value>,
    /// Largest length that the stack has had. It keeps the memory of that length.
    longest_stack: usize,
    marks: Vec<usize>,
    memo: HashMap<u64, Value>,
    sequences: Vec<Vec<Value>>,
    dicts: Vec<Vec<(Value, Value)>>,
    storages: Vec<Rc<Storage>>,
}

impl<'a, 'b> Unpickler<'a, 'b> {
    fn new(bytes: &'a [u8], budget: &'b mut ParseBudget) -> Self {
        let (dicts, sequences, storages) = (Vec::new(), Vec::new(), Vec::new());
        let (stack, marks, memo) = (Vec::new(), Vec::new(), HashMap::new());
        Self { bytes, budget, at: 0, stack, longest_stack: 0, marks, memo, sequences, dicts, storages }
    }

    fn push(&mut self, value: Value) -> Result<()> {
        if self.stack.len() == self.longest_stack {
            self.longest_stack += 1;
            self.budget.take(VALUE)?;
        }
        self.stack.push(value);
        Ok(())
    }

    fn run(&mut self) -> Result<Value> {
        loop {
            let opcode = self.take(1)?[0];
            match opcode {
                b'.' => return self.pop(),
                b'(' => {
                    self.budget.take(size_of::<usize>())?;
                    self.marks.push(self.stack.len());
                }
                b'0' => drop(self.pop()?),
                b'1' => drop(self.pop_mark()?),
                b'}' | b']' | b')' | b't' | b'l' | b'd' | 0x85..=0x87 => self.container(opcode)?,
                b'a' | b'e' | b's' | b'u' => self.fill(opcode)?,
                b'q' | b'r' | 0x94 | b'h' | b'j' => self.memo(opcode)?,
                b'c' | 0x93 | b'R' | b'b' | b'Q' => self.object(opcode)?,
                _ => {
                    if let Some(value) = self.scalar(opcode)? {
                        self.push(value)?;
                    }
                }
            }
        }
    }

    fn take(&mut self, count: usize) -> Result<&[u8]> {
        let end = self.at.checked_add(count).filter(|&end| end <= self.bytes.len());
        let Some(end) = end else { return malformed("its pickle ends early") };
        let from = std::mem::replace(&mut self.at, end);
        Ok(&self.bytes[from..end])
    }

    fn number(&mut self, width: usize) -> Result<u64> {
        let mut bytes = [0; 8];
        bytes[..width].copy_from_slice(self.take(width)?);
        Ok(u64::from_le_bytes(bytes))
    }

    fn line(&mut self) -> Result<String> {
        let rest = &self.bytes[self.at..];
        let Some(length) = rest.iter().position(|&b| b == b'\n') else { return malformed("its pickle ends early") };
        let text = String::from_utf8_lossy(&rest[..length]).into_owned();
        self.at += length + 1;
        Ok(text)
    }

    fn text(&mut self, width: usize) -> Result<Value> {
        let Ok(length) = usize::try_from(self.number(width)?) else { return malformed("a string is too long") };
        self.budget.take(length.saturating_add(VALUE))?;
        match std::str::from_utf8(self.take(length)?) {
            Ok(text) => Ok(Value::Str(text.into())),
            Err(_) => malformed("a string is not UTF-8"),
        }
    }

    fn skip(&mut self, width: usize) -> Result<Value> {
        let Ok(length) = usize::try_from(self.number(width)?) else { return malformed("a value is too long") };
        self.take(length)?;
        Ok(Value::Other)
    }

    fn pop(&mut self) -> Result<Value> {
        // values below the last mark belong to the enclosing container
        if self.stack.len() <= self.marks.last().copied().unwrap_or(0) {
            return malformed("its pickle pops an empty stack");
        }
        Ok(self.stack.pop().expect("the length was checked"))
    }

    fn pop_mark(&mut self) -> Result<Vec<Value>> {
        let Some(mark) = self.marks.pop() else { return malformed("its pickle lacks a mark") };
        self.budget.take((self.stack.len() - mark).saturating_mul(VALUE))?;
        Ok(self.stack.split_off(mark))
    }

    /// Constants; `None` for opcodes without a value.
    fn scalar(&mut self, opcode: u8) -> Result<Option<Value>> {
        Ok(Some(match opcode {
            0x80 => match self.take(1)?[0] {
                0..=5 => return Ok(None),
                protocol => return malformed(format!("its pickle has the unknown protocol {protocol}")),
            },
            0x95 => return self.take(8).map(|_| None),
            b'N' => Value::None,
            0x88 | 0x89 => Value::Other,
            b'K' => Value::Int(i64::from(self.take(1)?[0])),
            b'M' => Value::Int(self.number(2)?.cast_signed()),
            #[expect(clippy::cast_possible_truncation, reason = "four bytes were read")]
            b'J' => Value::Int(i64::from((self.number(4)? as u32).cast_signed())),
            0x8a => {
                let length = usize::from(self.take(1)?[0]);
                let bytes = self.take(length)?;
                if length > 8 {
                    Value::Other
                } else {
                    let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
                    let mut wide = [if negative { 0xff } else { 0 }; 8];
                    wide[..length].copy_from_slice(bytes);
                    Value::Int(i64::from_le_bytes(wide))
                }
            }
            b'G' => self.take(8).map(|_| Value::Other)?,
            0x8c => self.text(1)?,
            b'X' => self.text(4)?,
            0x8d => self.text(8)?,
            b'U' | b'C' => self.skip(1)?,
            b'T' | b'B' => self.skip(4)?,
            0x8e => self.skip(8)?,
            other => return malformed(format!("its pickle uses opcode 0x{other:02x}, which no state dict needs")),
        }))
    }

    fn container(&mut self, opcode: u8) -> Result<()> {
        let items = match opcode {
            b'}' | b']' | b')' => Vec::new(),
            b'd' | b'l' | b't' => self.pop_mark()?,
            _ => {
                self.budget.take(3 * VALUE)?;
                let mut items = (0x85..=opcode).map(|_| self.pop()).collect::<Result<Vec<_>>>()?;
                items.reverse();
                items
            }
        };
        let value = match opcode {
            b'}' | b'd' => self.new_dict(pairs(items)?)?,
            b']' | b'l' => self.new_sequence(items, Value::List)?,
            _ => self.new_sequence(items, Value::Tuple)?,
        };
        self.push(value)
    }

    fn new_dict(&mut self, pairs: Vec<(Value, Value)>) -> Result<Value> {
        self.budget.take(VALUE)?;
        self.dicts.push(pairs);
        Ok(Value::Dict(self.dicts.len() - 1))
    }

    fn new_sequence(&mut self, items: Vec<Value>, value: fn(usize) -> Value) -> Result<Value> {
        self.budget.take(VALUE)?;
        self.sequences.push(items);
        Ok(value(self.sequences.len() - 1))
    }

    fn fill(&mut self, opcode: u8) -> Result<()> {
        if matches!(opcode, b'a' | b's') {
            self.budget.take(2 * VALUE)?;
        }
        let items = match opcode {
            b'a' => vec![self.pop()?],
            b's' => {
                let value = self.pop()?;
                vec![self.pop()?, value]
            }
            _ => self.pop_mark()?,
        };
        match (opcode, self.stack.last()) {
            (b'a' | b'e', Some(&Value::List(index))) => self.sequences[index].extend(items),
            (b's' | b'u', Some(&Value::Dict(index))) => self.dicts[index].extend(pairs(items)?),
            _ => return malformed("its pickle adds items to a value that is not a list or dictionary"),
        }
        Ok(())
    }

    fn memo(&mut self, opcode: u8) -> Result<()> {
        let key = match opcode {
            b'q' | b'h' => self.number(1)?,
            b'r' | b'j' => self.number(4)?,
            _ => self.memo.len() as u64,
        };
        if matches!(opcode, b'h' | b'j') {
            let Some(value) = self.memo.get(&key) else { return malformed("its pickle reads an unset memo") };
            let value = value.clone();
            self.push(value)?;
        } else {
            self.budget.take(MEMO)?;
            let Some(value) = self.stack.last() else { return malformed("its pickle memoizes from an empty stack") };
            self.memo.insert(key, value.clone());
        }
        Ok(())
    }

    fn object(&mut self, opcode: u8) -> Result<()> {
        let value = match opcode {
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                Value::Function(allowed(&module, &name)?)
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let (Value::Str(module), Value::Str(name)) = (module, name) else {
                    return malformed("its pickle names a function by a value that is not a string");
                };
                Value::Function(allowed(&module, &name)?)
            }
            b'R' => {
                let arguments = self.pop()?;
                let function = self.pop()?;
                self.call(&function, &arguments)?
            }
            b'b' => {
                // the state of an `OrderedDict` is `_metadata` (module versions); no other value has a state here
                self.pop()?;
                match self.stack.last() {
                    Some(Value::Dict(_)) => return Ok(()),
                    _ => return malformed("its pickle sets the state of a value that is not a dictionary"),
                }
            }
            _ => {
                let id = self.pop()?;
                self.storage(&id)?
            }
        };
        self.push(value)
    }

    /// `('storage', torch.FloatStorage, '0', 'cpu', 1536)`; before PyTorch 1.6 with `None` at the end.
    fn storage(&mut self, id: &Value) -> Result<Value> {
        let (kind, key, num_elements) = match items(&self.sequences, id)? {
            [
                Value::Str(tag),
                Value::Function(kind),
                Value::Str(key),
                Value::Str(_device),
                Value::Int(count),
                rest @ ..,
            ] if &**tag == "storage" && matches!(rest, [] | [Value::None]) => (*kind, key.clone(), *count),
            _ => return malformed("a persistent id is not a storage"),
        };
        let Function::Storage(kind) = kind else { return malformed("a storage has no element type") };
        let storage = Rc::new(Storage { kind, key, num_elements });
        self.budget.take(size_of::<Storage>() + 2 * VALUE)?;
        self.storages.push(storage.clone());
        Ok(Value::Storage(storage))
    }

    fn call(&mut self, function: &Value, arguments: &Value) -> Result<Value> {
        let Value::Function(function) = function else {
            return malformed("its pickle calls a value that is not a function");
        };
        let Self { sequences, budget, .. } = self;
        let value = match (function, items(sequences, arguments)?) {
            (Function::OrderedDict, []) => return self.new_dict(Vec::new()),
            (Function::OrderedDict, [list]) => {
                let list = items(sequences, list)?;
                budget.take(list.len().saturating_mul(2 * VALUE))?;
                let mut pairs = Vec::with_capacity(list.len());
                for pair in list {
                    let [key, value] = items(sequences, pair)? else {
                        return malformed("an `OrderedDict` is built from values that are not pairs");
                    };
                    pairs.push((key.clone(), value.clone()));
                }
                return self.new_dict(pairs);
            }
            (Function::RebuildTensor, [Value::Storage(storage), Value::Int(offset), shape, strides, ..]) => {
                let (shape, strides) = (integers(sequences, shape)?, integers(sequences, strides)?);
                budget.take(size_of::<TensorRef>() + VALUE + size_of::<i64>() * (shape.len() + strides.len()))?;
                Value::Tensor(Rc::new(TensorRef { storage: storage.clone(), offset: *offset, shape, strides }))
            }
            (Function::RebuildParameter, [tensor @ Value::Tensor(_), ..]) => tensor.clone(),
            _ => return malformed("its pickle calls a known function with unknown arguments"),
        };
        Ok(value)
    }
}

fn items<'s>(sequences: &'s [Vec<Value>], value: &Value) -> Result<&'s [Value]> {
    match value {
        Value::Tuple(index) | Value::List(index) => Ok(&sequences[*index]),
        _ => malformed("its pickle has another value where a tuple belongs"),
    }
}

/// A shape or strides.
fn integers(sequences: &[Vec<Value>], value: &Value) -> Result<Vec<i64>> {
    let items = items(sequences, value)?;
    if items.len() > MAX_DIMENSIONS {
        return malformed(format!("a tensor has {} dimensions; {MAX_DIMENSIONS} are the limit", items.len()));
    }
    let integer = |item: &Value| match item {
        Value::Int(integer) => Ok(*integer),
        _ => malformed("a shape or stride is not an integer"),
    };
    items.iter().map(integer).collect()
}

fn pairs(items: Vec<Value>) -> Result<Vec<(Value, Value)>> {
    if !items.len().is_multiple_of(2) {
        return malformed("a dictionary has a key without a value");
    }
    let mut items = items.into_iter();
    Ok(std::iter::from_fn(|| items.next().zip(items.next())).collect())
}

fn allowed(module: &str, name: &str) -> Result<Function> {
    let storage = DTYPES.iter().find(|(.., storage)| module == "torch" && *storage == name);
    Ok(match (module, name) {
        ("collections", "OrderedDict") => Function::OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2") => Function::RebuildTensor,
        ("torch._utils", "_rebuild_parameter") => Function::RebuildParameter,
        _ => match storage {
            Some((kind, ..)) => Function::Storage(*kind),
            None => return Err(PickleError::Executes(format!("{module}.{name}"))),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(bytes: &[u8]) -> Result<Pickle> {
        Pickle::read(bytes, &mut ParseBudget::new(bytes.len()))
    }

    #[test]
    fn a_pickle_that_names_another_function_is_an_error() {
        // `os.system("true")` in protocol 0
        let error = parse(b"cos\nsystem\n(U\x04true\x85R.").unwrap_err();
        assert_eq!(error, PickleError::Executes("os.system".into()));
        // the same through STACK_GLOBAL
        let error = parse(b"\x80\x04\x8c\x05posix\x8c\x06system\x93.").unwrap_err();
        assert_eq!(error, PickleError::Executes("posix.system".into()));
    }

    #[test]
    fn every_prefix_of_a_pickle_is_malformed_and_never_a_panic() {
        // {"a": [1, 300, -2, None, True, 2**40], "b": (1.5, b"x")} in protocol 4
        let whole: &[u8] =
            b"\x80\x04}\x94(\x8c\x01a\x94]\x94(K\x01M\x2c\x01J\xfe\xff\xff\xffN\x88\x8a\x06\0\0\0\0\0\x01e\
            \x8c\x01bG?\xf8\0\0\0\0\0\0C\x01x\x86u.";
        let mut budget = ParseBudget::new(whole.len());
        let mut unpickler = Unpickler::new(whole, &mut budget);
        assert!(matches!(unpickler.run().unwrap(), Value::Dict(0)));
        let [(_, list), (_, tuple)] = unpickler.dicts[0].as_slice() else { panic!("two pairs") };
        let list = items(&unpickler.sequences, list).unwrap();
        assert!(matches!(
            list,
            [Value::Int(1), Value::Int(300), Value::Int(-2), Value::None, Value::Other, Value::Int(n)]
                if *n == 1 << 40
        ));
        assert!(matches!(items(&unpickler.sequences, tuple).unwrap(), [Value::Other, Value::Other]));
        for end in 0..whole.len() {
            assert!(matches!(parse(&whole[..end]), Err(PickleError::Malformed(_))), "prefix of {end} bytes");
        }
    }

    #[test]
    fn changed_bytes_give_a_value_or_an_error() {
        let whole = b"\x80\x02ccollections\nOrderedDict\nq\0)Rq\x01(X\x01\0\0\0aq\x02K\x01u}q\x03X\x01\0\0\0bK\x02sb.";
        assert!(parse(whole).is_ok());
        for at in 0..whole.len() {
            for byte in 0..=255 {
                let mut changed = *whole;
                changed[at] = byte;
                let _ = parse(&changed);
            }
        }
    }

    #[test]
    fn a_tensor_of_more_than_64_dimensions_is_malformed() {
        let tensor = |dimensions: usize| {
            let ones = b"K\x01".repeat(dimensions);
            let storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x01tQ".as_slice();
            let start = b"ctorch._utils\n_rebuild_tensor_v2\n(".as_slice();
            [start, storage, b"K\0(", &ones, b"t(", &ones, b"ttR."].concat()
        };
        assert!(matches!(parse(&tensor(64)).unwrap().top, Value::Tensor(_)));
        let error = parse(&tensor(65)).unwrap_err();
        assert_eq!(error, PickleError::Malformed("a tensor has 65 dimensions; 64 are the limit".into()));
    }
}
