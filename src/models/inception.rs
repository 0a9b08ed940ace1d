//! InceptionV3 features for FID and KID: the 2048 values after the last pooling (Szegedy et al. 2016).
//!
//! Source: `FIDInceptionV3` of pytorch-fid. Its weights `pt_inception-2015-12-05-6726825d.pth` are those of the
//! TensorFlow network of 2015; FID values are comparable only with these weights. Keys are torchvision's
//! (`Mixed_5b.branch1x1.conv.weight`). The network differs from torchvision's in two points: average pools do not count
//! padding, and the last block uses max pooling.
//!
//! Deviations: no classifier (`fc`), and tests may divide the widths.
//!
//! Legend: b batch, c channels, h w rows and columns.

use crate::nn::cast;
use crate::tensor::store::{Init, VarPath};
use crate::tensor::{Tensor, dims, no_grad};

/// Default source of the published weights: a hub repository whose [`WEIGHTS_FILE`] is pytorch-fid's.
pub const WEIGHTS: &str = "hub:RaphaelLiu/EvalCrafter-Models";

/// Name of pytorch-fid's file, which is published on `github.com/mseitzer/pytorch-fid`, release `fid_weights`.
pub const WEIGHTS_FILE: &str = "pt_inception-2015-12-05-6726825d.pth";

/// Side of the network's input in pixels.
pub const SIZE: i64 = 299;

/// Epsilon of every batch normalisation.
const EPSILON: f64 = 1e-3;

/// Convolution, batch normalisation with running statistics, ReLU.
#[derive(Debug)]
struct Conv {
    weight: Tensor,
    /// Weight, bias, mean and variance of the normalisation.
    norm: [Tensor; 4],
    stride: i64,
    padding: [i64; 2],
}

impl Conv {
    fn forward(&self, xs: &Tensor) -> Tensor {
        let kind = xs.kind();
        let ys = xs.conv2d(&cast(&self.weight, kind), None::<Tensor>, [self.stride; 2], self.padding, [1, 1], 1);
        let [weight, bias, mean, variance] = &self.norm;
        ys.batch_norm(Some(weight), Some(bias), Some(mean), Some(variance), false, 0.0, EPSILON, true).relu()
    }
}

/// Creates the convolutions of one block path. Widths are those of the published network.
struct ConvBuilder<'a> {
    vs: &'a VarPath,
    divisor: i64,
}

impl ConvBuilder<'_> {
    fn conv(&self, name: &str, [in_dim, out_dim]: [i64; 2], kernel: [i64; 2], stride: i64, padding: [i64; 2]) -> Conv {
        let vs = self.vs.sub(name);
        let norm = vs.sub("bn");
        // the three channels of the image are not divided
        let in_dim = if in_dim == 3 { 3 } else { in_dim / self.divisor };
        let out_dim = out_dim / self.divisor;
        let line = |name: &str, value: f64| norm.param(name, &[out_dim], Init::Const(value));
        Conv {
            weight: vs.sub("conv").param("weight", &[out_dim, in_dim, kernel[0], kernel[1]], Init::FanIn),
            norm: [line("weight", 1.0), line("bias", 0.0), line("running_mean", 0.0), line("running_var", 1.0)],
            stride,
            padding,
        }
    }

    /// Stride 1, with padding that keeps the size of the map.
    fn same(&self, name: &str, in_dim: i64, out_dim: i64, kernel: [i64; 2]) -> Conv {
        self.conv(name, [in_dim, out_dim], kernel, 1, kernel.map(|side| side / 2))
    }

    fn one(&self, name: &str, in_dim: i64, out_dim: i64) -> Conv {
        self.same(name, in_dim, out_dim, [1, 1])
    }

    /// 3x3, stride 2, no padding.
    fn halving(&self, name: &str, in_dim: i64, out_dim: i64) -> Conv {
        self.conv(name, [in_dim, out_dim], [3, 3], 2, [0, 0])
    }
}

/// Convolutions in sequence.
type Chain = Vec<Conv>;

fn run(chain: &[Conv], xs: &Tensor) -> Tensor {
    chain.iter().fold(xs.shallow_clone(), |xs, conv| conv.forward(&xs))
}

/// Pooling in a block's pooled path.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Pooling {
    /// 3x3 average, without counting padding.
    Mean,
    /// 3x3 maximum.
    Max,
    /// 3x3 maximum, stride 2.
    Halving,
}

impl Pooling {
    fn forward(self, xs: &Tensor) -> Tensor {
        match self {
            Self::Mean => xs.avg_pool2d([3, 3], [1, 1], [1, 1], false, false, None),
            Self::Max => xs.max_pool2d([3, 3], [1, 1], [1, 1], [1, 1], false),
            Self::Halving => xs.max_pool2d([3, 3], [2, 2], [0, 0], [1, 1], false),
        }
    }
}

/// A path of a block: convolutions, and optionally two parallel ones at its end.
#[derive(Debug)]
struct Branch {
    chain: Chain,
    fork: Option<[Conv; 2]>,
}

impl Branch {
    fn forward(&self, xs: &Tensor) -> Tensor {
        let xs = run(&self.chain, xs);
        match &self.fork {
            Some(sides) => Tensor::cat(&sides.each_ref().map(|conv| conv.forward(&xs)), 1),
            None => xs,
        }
    }
}

/// A `Mixed_*` block: branches and a pooled path. Their channels are concatenated in this order.
#[derive(Debug)]
struct MixedBlock {
    branches: Vec<Branch>,
    pool: Pooling,
    branch_pool: Option<Conv>,
}

impl MixedBlock {
    fn new(chains: Vec<Chain>, pool: Pooling, branch_pool: Option<Conv>) -> Self {
        let branches = chains.into_iter().map(|chain| Branch { chain, fork: None }).collect();
        Self { branches, pool, branch_pool }
    }

    /// `Mixed_5b`, `5c`, `5d`: 1x1, 5x5 and two 3x3.
    fn inception_a(make: &ConvBuilder, dim: i64, pooled: i64) -> Self {
        let chains = vec![
            vec![make.one("branch1x1", dim, 64)],
            vec![make.one("branch5x5_1", dim, 48), make.same("branch5x5_2", 48, 64, [5, 5])],
            vec![
                make.one("branch3x3dbl_1", dim, 64),
                make.same("branch3x3dbl_2", 64, 96, [3, 3]),
                make.same("branch3x3dbl_3", 96, 96, [3, 3]),
            ],
        ];
        Self::new(chains, Pooling::Mean, Some(make.one("branch_pool", dim, pooled)))
    }

    /// `Mixed_6a`: halves the map.
    fn inception_b(make: &ConvBuilder, dim: i64) -> Self {
        let chains = vec![
            vec![make.halving("branch3x3", dim, 384)],
            vec![
                make.one("branch3x3dbl_1", dim, 64),
                make.same("branch3x3dbl_2", 64, 96, [3, 3]),
                make.halving("branch3x3dbl_3", 96, 96),
            ],
        ];
        Self::new(chains, Pooling::Halving, None)
    }

    /// `Mixed_6b` to `6e`: 7x7 as rows and columns, `mid` channels inside.
    fn inception_c(make: &ConvBuilder, mid: i64) -> Self {
        let (row, column) = ([1, 7], [7, 1]);
        let chains = vec![
            vec![make.one("branch1x1", 768, 192)],
            vec![
                make.one("branch7x7_1", 768, mid),
                make.same("branch7x7_2", mid, mid, row),
                make.same("branch7x7_3", mid, 192, column),
            ],
            vec![
                make.one("branch7x7dbl_1", 768, mid),
                make.same("branch7x7dbl_2", mid, mid, column),
                make.same("branch7x7dbl_3", mid, mid, row),
                make.same("branch7x7dbl_4", mid, mid, column),
                make.same("branch7x7dbl_5", mid, 192, row),
            ],
        ];
        Self::new(chains, Pooling::Mean, Some(make.one("branch_pool", 768, 192)))
    }

    /// `Mixed_7a`: halves the map.
    fn inception_d(make: &ConvBuilder) -> Self {
        let chains = vec![
            vec![make.one("branch3x3_1", 768, 192), make.halving("branch3x3_2", 192, 320)],
            vec![
                make.one("branch7x7x3_1", 768, 192),
                make.same("branch7x7x3_2", 192, 192, [1, 7]),
                make.same("branch7x7x3_3", 192, 192, [7, 1]),
                make.halving("branch7x7x3_4", 192, 192),
            ],
        ];
        Self::new(chains, Pooling::Halving, None)
    }

    /// `Mixed_7b`, `7c`: 3x3 as a parallel row and column.
    fn inception_e(make: &ConvBuilder, dim: i64, pool: Pooling) -> Self {
        let fork = |a: &str, b: &str| Some([make.same(a, 384, 384, [1, 3]), make.same(b, 384, 384, [3, 1])]);
        let branches = vec![
            Branch { chain: vec![make.one("branch1x1", dim, 320)], fork: None },
            Branch { chain: vec![make.one("branch3x3_1", dim, 384)], fork: fork("branch3x3_2a", "branch3x3_2b") },
            Branch {
                chain: vec![make.one("branch3x3dbl_1", dim, 448), make.same("branch3x3dbl_2", 448, 384, [3, 3])],
                fork: fork("branch3x3dbl_3a", "branch3x3dbl_3b"),
            },
        ];
        Self { branches, pool, branch_pool: Some(make.one("branch_pool", dim, 192)) }
    }

    fn forward(&self, xs: &Tensor) -> Tensor {
        let mut parts: Vec<Tensor> = self.branches.iter().map(|branch| branch.forward(xs)).collect();
        let pooled = self.pool.forward(xs);
        parts.push(self.branch_pool.as_ref().map_or_else(|| pooled.shallow_clone(), |conv| conv.forward(&pooled)));
        Tensor::cat(&parts, 1)
    }
}

/// The network up to its last pooling.
#[derive(Debug)]
pub struct Inception {
    /// `Conv2d_1a_3x3`, `2a`, `2b`.
    stem: Chain,
    /// `Conv2d_3b_1x1`, `4a_3x3`.
    middle: Chain,
    mixed: Vec<MixedBlock>,
}

impl Inception {
    /// The published sizes.
    pub fn new(vs: &VarPath) -> Self {
        Self::with_divisor(vs, 1)
    }

    /// Every width is divided by `divisor`, which must divide 16.
    pub fn with_divisor(vs: &VarPath, divisor: i64) -> Self {
        let root = ConvBuilder { vs, divisor };
        let stem = vec![
            root.halving("Conv2d_1a_3x3", 3, 32),
            root.conv("Conv2d_2a_3x3", [32, 32], [3, 3], 1, [0, 0]),
            root.same("Conv2d_2b_3x3", 32, 64, [3, 3]),
        ];
        let middle = vec![root.one("Conv2d_3b_1x1", 64, 80), root.conv("Conv2d_4a_3x3", [80, 192], [3, 3], 1, [0, 0])];
        let mut mixed = Vec::new();
        let mut add = |name: &str, make: &dyn Fn(&ConvBuilder) -> MixedBlock| {
            mixed.push(make(&ConvBuilder { vs: &vs.sub(name), divisor }));
        };
        add("Mixed_5b", &|make| MixedBlock::inception_a(make, 192, 32));
        add("Mixed_5c", &|make| MixedBlock::inception_a(make, 256, 64));
        add("Mixed_5d", &|make| MixedBlock::inception_a(make, 288, 64));
        add("Mixed_6a", &|make| MixedBlock::inception_b(make, 288));
        add("Mixed_6b", &|make| MixedBlock::inception_c(make, 128));
        add("Mixed_6c", &|make| MixedBlock::inception_c(make, 160));
        add("Mixed_6d", &|make| MixedBlock::inception_c(make, 160));
        add("Mixed_6e", &|make| MixedBlock::inception_c(make, 192));
        add("Mixed_7a", &MixedBlock::inception_d);
        add("Mixed_7b", &|make| MixedBlock::inception_e(make, 1280, Pooling::Mean));
        add("Mixed_7c", &|make| MixedBlock::inception_e(make, 2048, Pooling::Max));
        Self { stem, middle, mixed }
    }

    /// Features of images, without gradients.
    ///
    /// # Shapes
    /// `images [b, 3, h, w]` in 0..=1 to `[b, 2048 / divisor]`, in the dtype and on the device of the weights.
    pub fn features(&self, images: &Tensor) -> Tensor {
        let [_b, _c, _h, _w] = dims(images);
        no_grad(|| {
            let weight = &self.stem[0].weight;
            let images = images.to_device(weight.device()).to_kind(weight.kind());
            let xs = run(&self.stem, &(resized(&images) * 2.0 - 1.0));
            let xs = run(&self.middle, &Pooling::Halving.forward(&xs));
            let xs = self.mixed.iter().fold(Pooling::Halving.forward(&xs), |xs, block| block.forward(&xs));
            xs.mean_dim([2, 3].as_slice(), false, xs.kind())
        })
    }
}

/// Resizes images to the network's size, bilinear without antialiasing. Images of that size stay unchanged.
///
/// # Shapes
/// `images [b, 3, h, w]` to `[b, 3, 299, 299]`.
pub fn resized(images: &Tensor) -> Tensor {
    let [_b, _c, h, w] = dims(images);
    if h == SIZE && w == SIZE {
        return images.shallow_clone();
    }
    images.upsample_bilinear2d([SIZE, SIZE], false, None, None)
}

/// True for keys of the published file that this network does not use.
pub fn is_unused(key: &str) -> bool {
    key.starts_with("fc.") || key.starts_with("AuxLogits.") || key.ends_with(".num_batches_tracked")
}
