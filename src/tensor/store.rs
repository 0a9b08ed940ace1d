//! Parameters by name: what is trained, what is frozen, how each is made.
//!
//! A model is built from [`Scope`]s that walk the same path as the checkpoint's keys. One [`Store`] holds the tensors of
//! one file of a checkpoint. Trained tensors are stored in fp32 (the master copy) and cast where they are used.

use super::nf4::{Nf4, Quantization};
use super::{Device, Kind, Tensor, ledger};
use std::cell::RefCell;
use std::rc::Rc;

/// What happens to a tensor during training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Gets gradients and optimizer steps; stored in fp32.
    Trainable,
    /// Never changes; stored in the frozen dtype.
    Frozen,
    /// Changed by the forward pass (running statistics), saved with the parameters.
    Buffer,
}

/// How a parameter starts when it is not loaded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// All elements equal.
    Const(f64),
    /// Normal around 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Uniform in `-bound..bound`.
    Uniform {
        /// Largest magnitude.
        bound: f64,
    },
    /// Glorot & Bengio 2010 with gain 1; fan-in and fan-out from the first two dimensions and the kernel.
    XavierUniform,
    /// PyTorch's default for linear and convolution weights: uniform with bound 1/sqrt(fan_in).
    FanIn,
}

impl Init {
    fn fill(self, tensor: &mut Tensor) {
        let size = tensor.size();
        let kernel: i64 = size.iter().skip(2).product();
        #[expect(clippy::cast_precision_loss, reason = "fan sizes are far below 2^52")]
        let fan = |dim: usize| (size.get(dim).copied().unwrap_or(1) * kernel) as f64;
        let _ = match self {
            Self::Const(value) => tensor.fill_(value),
            Self::Normal { std } => tensor.normal_(0.0, std),
            Self::Uniform { bound } => tensor.uniform_(-bound, bound),
            Self::XavierUniform => {
                let bound = (6.0 / (fan(0) + fan(1))).sqrt();
                tensor.uniform_(-bound, bound)
            }
            Self::FanIn => {
                let bound = 1.0 / fan(1).sqrt();
                tensor.uniform_(-bound, bound)
            }
        };
    }
}

/// A named tensor of a [`Store`]; the handle is shared with the model.
#[derive(Debug)]
pub struct Entry {
    /// Key in the checkpoint file.
    pub name: String,
    /// The tensor itself.
    pub tensor: Tensor,
    /// What happens to it.
    pub role: Role,
}

/// How a store's tensors are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreOptions {
    /// Where they live.
    pub device: Device,
    /// Dtype of frozen tensors.
    pub frozen_kind: Kind,
    /// Run the initialisers; `false` leaves memory untouched for a checkpoint to fill.
    pub initialise: bool,
}

impl StoreOptions {
    /// fp32 on the CPU, initialised.
    pub fn cpu() -> Self {
        Self { device: Device::Cpu, frozen_kind: Kind::Float, initialise: true }
    }
}

/// A weight matrix: of floating-point numbers, or frozen in 4 bits.
#[derive(Debug)]
pub enum Matrix {
    /// `[out, in]`.
    Dense(Tensor),
    /// Its pieces.
    Nf4(Rc<Nf4>),
}

impl Matrix {
    /// `[out, in]`.
    pub fn shape(&self) -> [i64; 2] {
        match self {
            Self::Dense(weight) => super::dims(weight),
            Self::Nf4(weight) => weight.shape(),
        }
    }
}

/// Matrices in 4 bits by the names of their dense forms.
type Quantized = Vec<(String, Rc<Nf4>)>;

/// All tensors of one checkpoint file, in the order they were made.
#[derive(Debug, Clone)]
pub struct Store {
    entries: Rc<RefCell<Vec<Entry>>>,
    /// Matrices in 4 bits by name; their pieces are among the entries.
    quantized: Rc<RefCell<Quantized>>,
    options: StoreOptions,
}

impl Store {
    /// An empty store.
    pub fn new(options: StoreOptions) -> Self {
        Self { entries: Rc::default(), quantized: Rc::default(), options }
    }

    /// The root path, making tensors of `role`.
    pub fn root(&self, role: Role) -> Scope {
        Scope { store: self.clone(), prefix: String::new(), role, quantization: Quantization::None, fills: true }
    }

    /// Calls `visit` for every entry.
    pub fn for_each(&self, mut visit: impl FnMut(&Entry)) {
        self.entries.borrow().iter().for_each(&mut visit);
    }

    /// The matrices in 4 bits with the names that their dense forms would have.
    pub fn quantized(&self) -> Vec<(String, Rc<Nf4>)> {
        self.quantized.borrow().clone()
    }

    /// Shallow clones of all tensors with their names and roles; a matrix in 4 bits has several, see [`Nf4::pieces`].
    pub fn entries(&self) -> Vec<Entry> {
        self.entries
            .borrow()
            .iter()
            .map(|e| Entry { name: e.name.clone(), tensor: e.tensor.shallow_clone(), role: e.role })
            .collect()
    }

    /// The tensor called `name`.
    pub fn get(&self, name: &str) -> Option<Tensor> {
        self.entries.borrow().iter().find(|e| e.name == name).map(|e| e.tensor.shallow_clone())
    }

    /// How the tensors are made.
    pub fn options(&self) -> StoreOptions {
        self.options
    }
}

/// A path inside a [`Store`].
#[derive(Debug, Clone)]
pub struct Scope {
    store: Store,
    prefix: String,
    role: Role,
    quantization: Quantization,
    /// Whether the initialisers of quantized matrices run.
    fills: bool,
}

impl Scope {
    /// The path extended by `name`.
    #[must_use]
    pub fn sub(&self, name: impl std::fmt::Display) -> Self {
        Self { prefix: format!("{}{name}.", self.prefix), ..self.clone() }
    }

    /// The same path, below which frozen matrices ([`Scope::matrix`]) are stored so; without `fills` no matrix draws
    /// random numbers.
    #[must_use]
    pub fn quantized(&self, quantization: Quantization, fills: bool) -> Self {
        Self { quantization, fills, ..self.clone() }
    }

    /// The device tensors are made on.
    pub fn device(&self) -> Device {
        self.store.options.device
    }

    /// Whether initialisers run.
    pub fn initialises(&self) -> bool {
        self.store.options.initialise
    }

    /// Makes the parameter `name` with this scope's role.
    pub fn param(&self, name: &str, shape: &[i64], init: Init) -> Tensor {
        let (kind, category) = match self.role {
            Role::Frozen => (self.store.options.frozen_kind, ledger::Category::Frozen),
            Role::Trainable | Role::Buffer => (Kind::Float, ledger::Category::Trainable),
        };
        self.insert(name, shape, init, (kind, category), self.role)
    }

    /// Makes the matrix `name`; its random values are those of the dense one, quantized.
    pub fn matrix(&self, name: &str, shape: [i64; 2], init: Init) -> Matrix {
        if self.quantization == Quantization::None || self.role != Role::Frozen {
            // zero where a file fills it: the random numbers of all other parameters are then the same in every scheme
            let init = if self.fills { init } else { Init::Const(0.0) };
            return Matrix::Dense(self.param(name, &shape, init));
        }
        let options = self.store.options;
        let matrix = Rc::new(Nf4::empty(shape, self.quantization == Quantization::Nf4Double, options.device));
        if options.initialise && self.fills {
            let _category = ledger::enter(ledger::Category::Workspace);
            let mut dense = Tensor::empty(shape, (options.frozen_kind, options.device));
            super::no_grad(|| init.fill(&mut dense));
            matrix.quantize(&dense);
        }
        let name = format!("{}{name}", self.prefix);
        for (key, piece) in matrix.pieces() {
            let entry = Entry { name: format!("{name}{key}"), tensor: piece.shallow_clone(), role: Role::Frozen };
            self.store.entries.borrow_mut().push(entry);
        }
        self.store.quantized.borrow_mut().push((name, Rc::clone(&matrix)));
        Matrix::Nf4(matrix)
    }

    /// Makes a buffer: never trained, changed by the forward pass, saved.
    pub fn buffer(&self, name: &str, shape: &[i64], value: f64, kind: Kind) -> Tensor {
        let place = (kind, ledger::Category::Trainable);
        self.insert(name, shape, Init::Const(value), place, Role::Buffer)
    }

    fn insert(&self, name: &str, shape: &[i64], init: Init, place: (Kind, ledger::Category), role: Role) -> Tensor {
        let _category = ledger::enter(place.1);
        let options = self.store.options;
        let mut tensor = Tensor::empty(shape, (place.0, options.device));
        if options.initialise {
            super::no_grad(|| init.fill(&mut tensor));
        }
        if role == Role::Trainable {
            tensor = tensor.set_requires_grad(true);
        }
        let entry = Entry { name: format!("{}{name}", self.prefix), tensor: tensor.shallow_clone(), role };
        self.store.entries.borrow_mut().push(entry);
        tensor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_roles_and_initialisers() {
        let _turn = crate::tensor::rng::TURN.lock();
        let store = Store::new(StoreOptions { frozen_kind: Kind::BFloat16, ..StoreOptions::cpu() });
        let trained = store.root(Role::Trainable).sub("layers").sub(3).param("weight", &[4, 5], Init::FanIn);
        let frozen = store.root(Role::Frozen).param("bias", &[2], Init::Const(1.0));
        assert!(trained.requires_grad() && trained.kind() == Kind::Float);
        assert!(!frozen.requires_grad() && frozen.kind() == Kind::BFloat16);
        assert!(trained.abs().max().double_value(&[]) <= 1.0 / 5_f64.sqrt());
        assert_eq!(store.entries()[0].name, "layers.3.weight");
        assert_eq!(store.get("bias").unwrap().double_value(&[0]), 1.0);
    }
}
