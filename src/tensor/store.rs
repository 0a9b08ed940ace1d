//! Parameters of a model by name: trainable or frozen, dtype, and initialization.
//!
//! A model is built with [`VarPath`]s, whose paths are the keys of the checkpoint. One [`Store`] holds the tensors of
//! one checkpoint file. Trainable tensors are stored in fp32 (the master weights) and cast where they are used, unless
//! their masters are in host memory ([`Store::with_masters`]).

use super::async_copy::pinned;
use super::host_weights::{host_tensor, is_stand_in};
use super::nf4::{Nf4, Quantization};
use super::{Device, Kind, META, Shared, Tensor, ledger, meta};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Role of a tensor in training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Gets gradients and optimizer steps. Stored in fp32.
    Trainable,
    /// Never changes. Stored in the frozen dtype.
    Frozen,
    /// Buffer: the forward pass changes it (running statistics). Saved with the parameters.
    Buffer,
}

/// Initial values of a parameter that is not loaded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// A constant.
    Const(f64),
    /// Normal distribution around 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Uniform distribution in `-bound..bound`.
    Uniform {
        /// Largest magnitude.
        bound: f64,
    },
    /// Glorot & Bengio 2010 with gain 1. Fan-in and fan-out come from the first two dimensions and the kernel size.
    XavierUniform,
    /// PyTorch's default for linear and convolution weights: uniform with bound `1 / sqrt(fan_in)`.
    FanIn,
}

impl Init {
    /// Overwrites `tensor` with these values.
    pub fn fill(self, tensor: &mut Tensor) {
        if !matches!(self, Self::Const(_)) && tensor.device() != super::META {
            super::rng::TEST_LOCK.check();
        }
        let size = tensor.size();
        let kernel: i64 = size.iter().skip(2).product();
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

/// A named tensor of a [`Store`]. The model shares the handle.
#[derive(Debug)]
pub struct StoreEntry {
    /// Key in the checkpoint file.
    pub name: String,
    /// The tensor.
    pub tensor: Tensor,
    /// Role in training.
    pub role: Role,
}

/// Options for creating the tensors of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreOptions {
    /// Device of the tensors.
    pub device: Device,
    /// Dtype of frozen tensors.
    pub frozen_kind: Kind,
    /// Initialize the tensors. `false` leaves the memory uninitialized, for a checkpoint to fill.
    pub initialise: bool,
}

impl StoreOptions {
    /// fp32 on the CPU, initialized.
    pub fn cpu() -> Self {
        Self { device: Device::Cpu, frozen_kind: Kind::Float, initialise: true }
    }
}

/// A weight matrix: floating point, or frozen in 4 bits.
#[derive(Debug)]
pub enum Matrix {
    /// `[out, in]`.
    Dense(Tensor),
    /// 4-bit NF4.
    Nf4(Shared<Nf4>),
}

impl Matrix {
    /// `[out, in]`.
    pub fn shape(&self) -> [i64; 2] {
        match self {
            Self::Dense(weight) => super::dims(weight),
            Self::Nf4(weight) => weight.shape(),
        }
    }

    /// This matrix with `copy(tensor)` in place of each tensor on the device, in a fixed order.
    #[must_use]
    pub fn copied(&self, copy: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        match self {
            Self::Dense(weight) => Self::Dense(copy(weight)),
            Self::Nf4(weight) => Self::Nf4(Shared::new(weight.copied(copy))),
        }
    }
}

fn locked<T>(list: &Mutex<T>) -> MutexGuard<'_, T> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}

/// NF4 matrices by the name of the weight.
type Quantized = Vec<(String, Shared<Nf4>)>;

/// All tensors of one checkpoint file, in order of creation.
#[derive(Debug, Clone)]
pub struct Store {
    entries: Arc<Mutex<Vec<StoreEntry>>>,
    /// NF4 matrices by name. Their tensors are also among the entries.
    quantized: Arc<Mutex<Quantized>>,
    /// Trained tensors with fp32 masters in host memory; see [`Self::with_masters`].
    masters: Option<Masters>,
    options: StoreOptions,
}

/// Trained tensors on the device and their masters.
#[derive(Debug, Clone)]
struct Masters {
    /// Dtype on the device.
    kind: Kind,
    weights: Arc<Mutex<Vec<Mastered>>>,
}

/// A trained tensor and its master.
#[derive(Debug)]
pub struct Mastered {
    /// Key in the checkpoint file.
    pub name: String,
    /// The tensor that the model uses, on the device.
    pub weight: Tensor,
    /// Its fp32 values in host memory. In a planned GPU run, where host memory is not counted, one number represents
    /// them.
    pub master: Tensor,
}

impl Mastered {
    /// A master of `shape`, not initialized.
    fn empty_master(shape: &[i64], device: Device) -> Tensor {
        match device {
            META if meta::target() == meta::PlanTarget::Cuda => Tensor::zeros([1], (Kind::Float, Device::Cpu)),
            META => Tensor::empty(shape, (Kind::Float, META)),
            _ => Tensor::empty(shape, (Kind::Float, Device::Cpu)),
        }
    }

    /// Gives the model the rounded values of the master.
    ///
    /// # Errors
    /// [`prsmed_base::Error::Torch`] from the GPU.
    pub fn round(&self) -> prsmed_base::Result<()> {
        if is_stand_in(&self.master) {
            return Ok(());
        }
        let mut weight = self.weight.detach();
        super::no_grad(|| {
            if let Device::Cuda(_) = weight.device() {
                // rounded on the host: half the bytes to copy, and no fp32 copy on the GPU
                weight.copy_(&pinned(&self.master.to_kind(weight.kind()))?);
            } else {
                weight.copy_(&self.master);
            }
            Ok(())
        })
    }
}

impl Store {
    /// An empty store.
    pub fn new(options: StoreOptions) -> Self {
        Self { entries: Arc::default(), quantized: Arc::default(), masters: None, options }
    }

    /// Trained tensors will have dtype `kind` on the device and fp32 masters in host memory. [`Self::entries`] and
    /// [`Self::get`] then return the masters; after these change, [`Mastered::round`] brings the values to the device.
    #[must_use]
    pub fn with_masters(self, kind: Kind) -> Self {
        Self { masters: Some(Masters { kind, weights: Arc::default() }), ..self }
    }

    /// The trained tensors with masters, in order of creation; empty without [`Self::with_masters`].
    pub fn mastered(&self) -> Vec<Mastered> {
        let clone = |one: &Mastered| Mastered {
            name: one.name.clone(),
            weight: one.weight.shallow_clone(),
            master: one.master.shallow_clone(),
        };
        self.masters.iter().flat_map(|masters| locked(&masters.weights).iter().map(clone).collect::<Vec<_>>()).collect()
    }

    /// The root path. It creates tensors of `role`.
    pub fn root(&self, role: Role) -> VarPath {
        let (quantization, store) = (Quantization::None, self.clone());
        VarPath { store, prefix: String::new(), role, quantization, fills: true, is_on_host: false, has_values: true }
    }

    /// Calls `visit` for every entry.
    pub fn for_each(&self, mut visit: impl FnMut(&StoreEntry)) {
        locked(&self.entries).iter().for_each(&mut visit);
    }

    /// The NF4 matrices with the names of their weights.
    pub fn quantized(&self) -> Vec<(String, Shared<Nf4>)> {
        locked(&self.quantized).clone()
    }

    /// Shallow clones of all tensors with names and roles. An NF4 matrix has several; see [`Nf4::pieces`].
    pub fn entries(&self) -> Vec<StoreEntry> {
        locked(&self.entries)
            .iter()
            .map(|e| StoreEntry { name: e.name.clone(), tensor: e.tensor.shallow_clone(), role: e.role })
            .collect()
    }

    /// The tensor called `name`.
    pub fn get(&self, name: &str) -> Option<Tensor> {
        locked(&self.entries).iter().find(|e| e.name == name).map(|e| e.tensor.shallow_clone())
    }

    /// Options of this store.
    pub fn options(&self) -> StoreOptions {
        self.options
    }
}

/// A variable path inside a [`Store`], like tch's `nn::Path`.
#[derive(Debug, Clone)]
pub struct VarPath {
    store: Store,
    prefix: String,
    role: Role,
    quantization: Quantization,
    /// Whether NF4 matrices are initialized.
    fills: bool,
    /// Whether tensors are in host memory, for [`HostWeights`](super::host_weights::HostWeights).
    is_on_host: bool,
    /// Whether tensors in the host memory of a GPU get values; else another rank has them.
    has_values: bool,
}

impl VarPath {
    /// The sub-path `name`.
    #[must_use]
    pub fn sub(&self, name: impl std::fmt::Display) -> Self {
        Self { prefix: format!("{}{name}.", self.prefix), ..self.clone() }
    }

    /// The same path, with another role for the tensors below it.
    #[must_use]
    pub fn with_role(&self, role: Role) -> Self {
        Self { role, ..self.clone() }
    }

    /// The names that lead here, with dots between them; empty at the root.
    pub fn path(&self) -> &str {
        self.prefix.strip_suffix('.').unwrap_or(&self.prefix)
    }

    /// The same path, with frozen matrices ([`VarPath::matrix`]) quantized below it. Without `fills` they are not
    /// initialized and draw no random numbers.
    #[must_use]
    pub fn quantized(&self, quantization: Quantization, fills: bool) -> Self {
        Self { quantization, fills, ..self.clone() }
    }

    /// The same path, with the tensors below it in host memory.
    #[must_use]
    pub fn on_host(&self) -> Self {
        Self { is_on_host: true, ..self.clone() }
    }

    /// The same path, whose tensors in the host memory of a GPU get their values from another rank. The same random numbers
    /// are drawn.
    #[must_use]
    pub fn without_values(&self) -> Self {
        Self { has_values: false, ..self.clone() }
    }

    /// Device that computes with the tensors.
    pub fn device(&self) -> Device {
        self.store.options.device
    }

    /// An uninitialized tensor of this path.
    fn empty(&self, shape: &[i64], kind: Kind) -> Tensor {
        let device = self.store.options.device;
        if self.is_on_host { host_tensor(shape, kind, device) } else { Tensor::empty(shape, (kind, device)) }
    }

    /// Initializes `tensor`. Random numbers come from the device that computes, wherever the tensor is.
    fn fill(&self, tensor: &mut Tensor, init: Init) {
        let device = self.store.options.device;
        if tensor.device() == device {
            init.fill(tensor);
            return;
        }
        let mut values = Tensor::empty(tensor.size(), (tensor.kind(), device));
        init.fill(&mut values);
        if self.has_values {
            tensor.copy_(&values);
        }
    }

    /// True if tensors are initialized here.
    pub fn initialises(&self) -> bool {
        self.store.options.initialise && self.has_values
    }

    /// Creates the parameter `name` with this path's role.
    pub fn param(&self, name: &str, shape: &[i64], init: Init) -> Tensor {
        let (kind, category) = match self.role {
            Role::Frozen => (self.store.options.frozen_kind, ledger::Category::Frozen),
            Role::Trainable | Role::Buffer => (Kind::Float, ledger::Category::Trainable),
        };
        self.insert(name, shape, init, (kind, category), self.role)
    }

    /// Creates the matrix `name`. A quantized matrix has the quantized random values of the dense one.
    pub fn matrix(&self, name: &str, shape: [i64; 2], init: Init) -> Matrix {
        if self.quantization == Quantization::None || self.role != Role::Frozen {
            // zero if a file fills it: then the random numbers of all other parameters are the same for every
            // quantization
            let init = if self.fills { init } else { Init::Const(0.0) };
            return Matrix::Dense(self.param(name, &shape, init));
        }
        let options = self.store.options;
        let is_double = self.quantization == Quantization::Nf4Double;
        let matrix = Shared::new(Nf4::new(shape, is_double, &|shape, kind| self.empty(shape, kind)));
        if options.initialise && self.fills && !is_stand_in(matrix.pieces()[0].1) {
            let _category = ledger::enter(ledger::Category::Workspace);
            let mut dense = Tensor::empty(shape, (options.frozen_kind, options.device));
            super::no_grad(|| init.fill(&mut dense));
            let is_gpu = matches!(options.device, Device::Cuda(_));
            if self.has_values || !is_gpu {
                matrix.quantize(&dense);
            }
        }
        let name = format!("{}{name}", self.prefix);
        for (key, piece) in matrix.pieces() {
            let entry = StoreEntry { name: format!("{name}{key}"), tensor: piece.shallow_clone(), role: Role::Frozen };
            locked(&self.store.entries).push(entry);
        }
        locked(&self.store.quantized).push((name, matrix.clone()));
        Matrix::Nf4(matrix)
    }

    /// Creates a buffer: never trained, changed by the forward pass, saved.
    pub fn buffer(&self, name: &str, shape: &[i64], value: f64, kind: Kind) -> Tensor {
        let place = (kind, ledger::Category::Trainable);
        self.insert(name, shape, Init::Const(value), place, Role::Buffer)
    }

    fn insert(&self, name: &str, shape: &[i64], init: Init, place: (Kind, ledger::Category), role: Role) -> Tensor {
        let _category = ledger::enter(place.1);
        let options = self.store.options;
        if let (Role::Trainable, Some(masters)) = (role, &self.store.masters) {
            return self.insert_mastered(name, shape, init, masters);
        }
        let mut tensor = self.empty(shape, place.0);
        if options.initialise && !is_stand_in(&tensor) {
            super::no_grad(|| self.fill(&mut tensor, init));
        }
        if role == Role::Trainable {
            tensor = tensor.set_requires_grad(true);
        }
        let entry = StoreEntry { name: format!("{}{name}", self.prefix), tensor: tensor.shallow_clone(), role };
        locked(&self.store.entries).push(entry);
        tensor
    }

    /// A trained tensor with a master, which becomes the entry.
    fn insert_mastered(&self, name: &str, shape: &[i64], init: Init, masters: &Masters) -> Tensor {
        let options = self.store.options;
        let mut master = Mastered::empty_master(shape, options.device);
        let mut weight = Tensor::empty(shape, (masters.kind, options.device));
        if options.initialise && !is_stand_in(&master) {
            super::no_grad(|| {
                self.fill(&mut master, init);
                weight.copy_(&master);
            });
        }
        let weight = weight.set_requires_grad(true);
        let name = format!("{}{name}", self.prefix);
        let entry = StoreEntry { name: name.clone(), tensor: master.shallow_clone(), role: Role::Trainable };
        locked(&self.store.entries).push(entry);
        locked(&masters.weights).push(Mastered { name, weight: weight.shallow_clone(), master });
        weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_have_names_roles_and_initial_values() {
        let _lock = crate::rng::TEST_LOCK.lock();
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
