//! Closed enums of model families.

/// Defines two enums with one variant for each family: its sizes, which settings and `model.json` contain, and its network,
/// which `new` builds from them. Both dereference to the trait that all families have.
///
/// In files the sizes have a field `family`, the name in quotes. The `unnamed` family has none: runs that are older than the
/// enum were trained with it.
macro_rules! families {
    (
        $(#[$sizes_doc:meta])* sizes $sizes:ident: $sizes_trait:ident;
        $(#[$network_doc:meta])* network $network:ident: $network_trait:ident;
        unnamed $last:ident($last_config:ty, $last_net:ty);
        $($(#[$attr:meta])? $name:ident($config:ty, $net:ty) = $family:literal;)*
    ) => {
        $(#[$sizes_doc])*
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(tag = "family", try_from = "serde_json::Value")]
        pub enum $sizes {
            $($(#[$attr])? #[serde(rename = $family)] #[doc = $family] $name($config),)*
            /// The family of runs that name none.
            #[serde(untagged)]
            $last($last_config),
        }

        impl TryFrom<serde_json::Value> for $sizes {
            type Error = serde_json::Error;

            fn try_from(mut fields: serde_json::Value) -> serde_json::Result<Self> {
                let family = fields.as_object_mut().and_then(|fields| fields.shift_remove("family"));
                match family.as_ref().map(|name| name.as_str().unwrap_or_default()) {
                    $($(#[$attr])? Some($family) => serde_json::from_value(fields).map(Self::$name),)*
                    None => serde_json::from_value(fields).map(Self::$last),
                    Some(other) => Err(serde::de::Error::custom(format!("the family `{other}` is not known"))),
                }
            }
        }

        impl std::ops::Deref for $sizes {
            type Target = dyn $sizes_trait;

            fn deref(&self) -> &Self::Target {
                match self {
                    $($(#[$attr])? Self::$name(sizes) => sizes,)*
                    Self::$last(sizes) => sizes,
                }
            }
        }

        impl std::ops::DerefMut for $sizes {
            fn deref_mut(&mut self) -> &mut Self::Target {
                match self {
                    $($(#[$attr])? Self::$name(sizes) => sizes,)*
                    Self::$last(sizes) => sizes,
                }
            }
        }

        $(#[$network_doc])*
        #[derive(Debug)]
        pub enum $network {
            $($(#[$attr])? #[doc = $family] $name(Box<$net>),)*
            /// The family of runs that name none.
            $last(Box<$last_net>),
        }

        impl $network {
            /// The network of `sizes`; `vs` is the root of its file.
            pub fn new(vs: &crate::tensor::store::VarPath, sizes: &$sizes) -> Self {
                match sizes {
                    $($(#[$attr])? $sizes::$name(sizes) => Self::$name(Box::new(<$net>::new(vs, sizes))),)*
                    $sizes::$last(sizes) => Self::$last(Box::new(<$last_net>::new(vs, sizes))),
                }
            }
        }

        impl std::ops::Deref for $network {
            type Target = dyn $network_trait;

            fn deref(&self) -> &Self::Target {
                match self {
                    $($(#[$attr])? Self::$name(network) => &**network,)*
                    Self::$last(network) => &**network,
                }
            }
        }
    };
}
pub(super) use families;
